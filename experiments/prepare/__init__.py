"""A frozen task file from a question file."""

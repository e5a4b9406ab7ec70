"""Reading question files and freezing them into tasks."""

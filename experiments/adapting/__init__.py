"""Making a multi-branch checkpoint out of a public Qwen2.5 directory, without ever holding its weights."""

"""A multi-branch checkpoint from a public Qwen2.5 directory."""

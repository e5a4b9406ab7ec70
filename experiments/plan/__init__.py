"""What each Qwen2.5 size needs in memory and time."""

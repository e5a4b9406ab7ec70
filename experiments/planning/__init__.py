"""What a checkpoint's config alone says about memory, work and time."""

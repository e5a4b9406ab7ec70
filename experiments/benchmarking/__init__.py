"""Measuring speed and memory: arms side by side in one process, their bits compared."""

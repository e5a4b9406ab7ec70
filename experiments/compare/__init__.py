"""Cross-checking two runs, boundaries or traces: where they differ first, and what would explain it."""

"""Two runs, boundary files or traces compared bit for bit, and the first difference named."""

"""The pieces of the report: runs read back, sections, figures, and the two renderings (Markdown, one HTML page)."""

"""One report of finished runs: report.md and an HTML page."""

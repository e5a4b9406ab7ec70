"""What every experiment shares: options, run directory, ledger, rows and their gates, progress, exit codes."""

"""Our ledgers in the columns of the paper's release."""

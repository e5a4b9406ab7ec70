"""The batch-invariant kernels: a row has the same bits whatever the rest of the call."""

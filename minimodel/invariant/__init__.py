"""Batch-invariant kernels: a row's bits do not depend on the rest of the call.

attention.py and linear.py are the kernels; each uses a fixed shape of product only after checks.py found on this device
that a row has the same bits at every place in it.
"""

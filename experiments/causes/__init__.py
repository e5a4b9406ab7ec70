"""Kernels and dtypes crossed on fixed prefixes: which of them make the constructions differ."""

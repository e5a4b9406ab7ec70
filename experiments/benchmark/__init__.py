"""Decoding speed and memory beside transformers, at compared bits."""

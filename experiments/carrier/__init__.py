"""Partial transplants: which part of the cache the continuation follows."""

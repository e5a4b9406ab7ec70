"""The answer matcher: which answer a text states. `score` holds the rules."""

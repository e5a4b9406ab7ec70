"""The answer matcher: which answer a text states, and whether it is the expected one. `score` holds the rules."""

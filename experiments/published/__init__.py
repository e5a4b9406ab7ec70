"""The released claims recomputed, and a run exported in the release's form."""

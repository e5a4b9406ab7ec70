"""Recomputes the paper's published claims and panels from its released ledgers (seven CSV files).

Source: the release "stage-replay-artifacts" v1.0.0 (CC BY 4.0), which is not part of this project.
"""

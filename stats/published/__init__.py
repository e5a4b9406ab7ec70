"""Recomputation of the paper's published claims from its released ledgers (seven CSV files).

Source: the release "stage-replay-artifacts" v1.0.0 (CC BY 4.0); its files are read where they lie and are no part of
this project.
"""

from stats.published.claims import Claim, recompute, recomputed_claims
from stats.published.selection import PanelCheck, rederive_panels

__all__ = ["Claim", "PanelCheck", "recompute", "recomputed_claims", "rederive_panels"]

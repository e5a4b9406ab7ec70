"""Statistics of the experiments, on numpy and scipy alone: intervals, answer scoring, selection rules, endpoints."""

"""What `experiments.causes` says of its cells: the rule, the distance to FP64, the tables."""

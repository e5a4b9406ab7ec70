"""Where `experiments.carrier` transplants, and its tables."""

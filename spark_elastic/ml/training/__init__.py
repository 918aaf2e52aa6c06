"""A training in every worker, phase by phase: what is the same whatever framework does the steps."""

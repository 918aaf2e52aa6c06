"""Train PyTorch modules on DataFrames: the estimator, its model, and what a worker does for them.

Start with `estimator` (on the driver) and `training` (in a worker).
"""

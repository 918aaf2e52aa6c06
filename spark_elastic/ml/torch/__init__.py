"""The PyTorch side of the estimators. `estimator` and `model` are public; `training.train` is what runs in a worker."""

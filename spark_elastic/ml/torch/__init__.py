"""The PyTorch side of the estimators. `estimator` and `model` are public; `training` is what runs in a worker."""

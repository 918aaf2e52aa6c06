"""The PyTorch side of the estimators. `estimator` and `model` are public; `train.train` is what runs in a worker."""

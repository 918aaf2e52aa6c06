"""The PyTorch side of the estimators. `estimator` and `model` are public; `engine.train` is what runs in a worker."""

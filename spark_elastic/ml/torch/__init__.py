"""The PyTorch side of the estimators."""

"""Train Keras models on DataFrames, on TensorFlow: the estimator, its model, and what a worker does for them.

Start with `estimator` (on the driver) and `training` (in a worker). Modules that a driver or worker imports before
TensorFlow is configured (`estimator`, `model`, `training`, `pickling`, `runtime`) import Keras in functions only.
"""

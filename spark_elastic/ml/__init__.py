"""Estimators and models for Spark ML: train on a DataFrame, transform another one.

Start with `estimator.ElasticEstimator`, whose `fit` is five steps. `torch.estimator` and `keras.estimator` hold the
public classes, `callbacks` the public callbacks. `shared_params` declares the settings; `training` runs in the workers;
`model`, `serving` and `added_columns` are `transform`; `run_folder` and `training_job` make a training resumable, with
what is in `runs`; `persistence` saves and loads.
"""

"""Estimators and models for Spark ML: train on a DataFrame, transform another one.

Start with `fit.FitRun`, whose steps `estimator.ElasticEstimator` calls. `torch.estimator` and `keras.estimator` hold
the public classes, `callbacks` the public callbacks. `shared_params` declares the settings; `datasets` writes the rows;
`training` runs in the workers; `model`, `serving` and `added_columns` are `transform`, and with `tables` `predict`;
`run_folder` makes a training resumable, with what is in `runs`; `persistence` saves and loads, `load_module` loads
where there is no Spark. The folders `torch` and `keras` have the same modules: `fit`, `spec` (a training's settings),
`dry_run`, `train`, `engine`, `metrics`, `model` and `saved_model`.
"""

"""Callbacks that report a fit to an experiment tracker: `MLflowCallback` and `TensorBoardCallback`.

They run on the driver, see `jobs.driver_callbacks`. `autologging` is what a fit does while MLflow's autologging is on.
"""

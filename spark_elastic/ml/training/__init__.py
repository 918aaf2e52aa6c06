"""A training in every worker, whatever framework computes the steps.

Start with `trainer.Trainer`, which runs the phases. `spec` is what a training is given and returns, `progress` how far
it has come, `engine` what a framework has to provide, `saving` what is written to the store, `reporting` what callbacks
and the driver see, `columns` how batches become tensors, `dry_run` what the driver checks before any worker starts.
"""

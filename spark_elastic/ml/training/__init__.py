"""A training in every worker, whatever framework computes the steps.

Start with `trainer.Trainer`, which runs the phases. `spec` has the settings, the progress and the result of a training,
`engine` the base classes of a framework, `saving` the files that are written to the store, `reporting` what callbacks
and the driver see, and `dry_run` the checks on the driver before any worker starts.
"""

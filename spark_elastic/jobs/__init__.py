"""Jobs: `run`, `run_async` and their settings.

Start reading at `run`, then `start`, which puts the parts together. `job` is the handle of a running job.
"""

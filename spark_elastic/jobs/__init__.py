"""How a job is put together: `run` and `run_async`, and their settings.

Start reading at `run`, then `start`, which puts the parts together. `job` is the handle of a running job.
"""

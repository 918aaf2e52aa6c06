"""How a job is put together: `run` and `run_async`, their settings, and the backends (a Spark cluster or this machine).

Start reading at `run`, then `start`, which puts the parts together. `job` is the handle of a running job.
"""

"""The code that runs on executors: an agent in each Spark task, and the worker process that it starts.

Start reading at `spark_agent` (the body of a Spark task) or `local_agent` (the same as a plain process). Both run
`agent`, which starts `main`, the worker, through `worker_process`. `driver_client` is the worker's link to the driver.
"""

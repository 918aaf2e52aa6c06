"""The code that runs on executors: an agent in each Spark task, and the worker process that it starts.

Start reading at `spark_agent`, the body of a Spark task. It runs `agent`, which the local launcher starts directly as a
plain process. The agent starts `main`, the worker, through `worker_process`; `wire.worker_link` is its link to the
driver.
"""

"""The driver's side of a job.

Start reading at `elastic_driver`, which runs a job: `peers` is its conversation with agents and workers (over the
`rendezvous_server`), `launcher` the interface to whatever starts agents, `hosts` the host discoveries, `output` what is
printed, `results` what workers returned, `preflight` the checks before a job starts. `spark` has the parts that need
Spark.
"""

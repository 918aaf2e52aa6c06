"""The driver's side of a job.

Start reading at `elastic_driver`, which runs a job: `peers` is its conversation with agents and workers (over the
`rendezvous_server`), `launcher` starts agents on this machine, `hosts` has the host discoveries, `output` what is
printed, `results` what workers returned, `pickled_call` the function as it travels to them.
"""

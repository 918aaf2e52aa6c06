"""Spark, below everything that uses it.

Start reading at `cluster`: the `Cluster` that `session` makes once for each call, and its two kinds, `classic` (a
SparkContext, reached through `jvm`) and `connect` (a session of Spark Connect, `connect_session`). `discovery` waits
for slots and places tasks together; `launcher`, with `slot_jobs`, and `connect_launcher` start agents in tasks of
their own, whose order among jobs is that of `slot_queue`; `executors` reports lost executors, by events that `bus`
collects. `reachability` proves to tasks which address is the driver's. `failures` finds causes in Spark's messages.

pyspark is imported inside of functions alone: a job of this machine needs none.
"""

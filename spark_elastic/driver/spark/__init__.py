"""The parts of the driver that need Spark. Only they and `preflight` import pyspark, and only inside of functions.

`launcher` starts agents in Spark tasks, one by one; `slot_jobs` has the Spark jobs for that, `slot_queue` orders the
jobs of one SparkContext; `discovery` waits for slots; `executors` reports lost executors; `bus` collects events of
Spark's listener bus; `cluster` has the calls of Spark's JVM.
"""

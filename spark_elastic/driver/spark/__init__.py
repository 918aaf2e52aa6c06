"""The parts of the driver that need Spark. Only they and `preflight` import pyspark, and only inside of functions.

`launcher` starts agents in Spark tasks, one by one; `slot_queue` orders the jobs of one SparkContext; `discovery` waits
for slots; `executors` reports lost executors; `cluster` has the calls of Spark's JVM.
"""

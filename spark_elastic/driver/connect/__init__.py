"""The parts of the driver for Spark Connect, where the scheduler is on a server and there is no JVM on this side.

`launcher` starts agents as queries of one task, one by one; `discovery` counts slots and places tasks together once;
`reachability` answers those tasks, so that the driver knows at which of its addresses executors reach it. Losses are
seen on the driver's own connections, because there is no listener.
"""

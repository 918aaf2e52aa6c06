"""The authenticated channel between the driver and its agents and workers.

`messages` defines the messages and `framing` their bytes. `channel` has the blocking end of a connection (worker) and
the asyncio end (driver, agent); `worker_link` is the interface that a training framework uses.
"""

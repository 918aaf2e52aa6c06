"""The authenticated channel between the driver and its agents and workers.

`messages` defines the messages and `framing` their bytes. `stream` is the asyncio end (driver, agent), `channel` the
blocking end (worker), and `worker_link` the interface that a training framework uses.
"""

"""The authenticated channel between the driver and its agents and workers: framing, messages, client."""

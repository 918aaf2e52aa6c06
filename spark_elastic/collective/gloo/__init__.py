"""The Gloo process group of a round: its rendezvous through the driver, its collectives, and its end.

Start with `process_group`; `rendezvous` has the stores, `shutdown` the interruption of blocked collectives.
"""

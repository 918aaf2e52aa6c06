"""The groups of processes that a collective can be called on: the world, a host's part of it, one of each host."""

from __future__ import annotations

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.process import process


class ProcessSet:
    """One of the groups that exist in every world, whoever is in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def group(self) -> GlooGroup | None:
        """Its Gloo group; None if this process is alone in it."""
        return process.group(self.name)

    def size(self) -> int:
        position = process.require()
        return {"global": position.size, "local": position.local_size, "cross": position.cross_size}[self.name]

    def rank(self) -> int:
        position = process.require()
        return {"global": position.rank, "local": position.local_rank, "cross": position.cross_rank}[self.name]

    def included(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<ProcessSet {self.name}>"


global_process_set = ProcessSet("global")
local_process_set = ProcessSet("local")
"""The processes on this host."""
cross_process_set = ProcessSet("cross")
"""The processes that have this one's local rank, one a host."""

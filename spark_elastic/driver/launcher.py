"""What brings an agent up in a slot: Spark jobs, or plain processes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spark_elastic.core.topology import SlotId
from spark_elastic.wire.handover import AgentOrder, AgentOutcome

SlotEndedCallback = Callable[[SlotId, str, AgentOutcome | None], None]
"""(slot, why, what the agent returned if it did return): a launch is over. Called from any thread."""


class Launcher(Protocol):
    """Launches agents. Every method returns at once, except `close`."""

    def start(self, order: AgentOrder, on_ended: SlotEndedCallback) -> None:
        """What to launch, and whom to tell; before the first `launch`."""
        ...

    def launch(self, slot: SlotId) -> None:
        """Bring up an agent in the slot. Ends with exactly one call of `on_ended`."""
        ...

    def withdraw(self, slot: SlotId, why: str) -> None:
        """End the slot's launch, pending or running."""
        ...

    def close(self, timeout_s: float) -> None:
        """End every launch and wait for its threads and processes; nothing of it is left."""
        ...

"""What the driver asks of whoever starts agents: Spark, or plain processes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spark_elastic.core.outcome import AgentOutcome
from spark_elastic.core.topology import LaunchId, SlotId

OnEnded = Callable[[SlotId, str, AgentOutcome | None], None]
"""Called from any thread, exactly once for each `launch`, when it is over: the slot, why in words, and what the agent
returned (None: it was lost, failed, or never began). By then the slot can be launched again."""


class Launcher(Protocol):
    """Starts one agent per slot. No call blocks on a cluster; everything comes back through `OnEnded`."""

    def launch(self, slot: SlotId) -> None:
        """Start the slot's agent.

        Raises:
            ValueError: if the slot's previous launch is not over.
        """
        ...

    def withdraw(self, slot: SlotId, why: str) -> None:
        """End the slot's launch, pending or running; nothing if it is over already."""
        ...

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        """An agent has come. Returns: whether it is awaited, or has to go: its launch is over, or told to end."""
        ...

    def agents_joined(self, slots: frozenset[SlotId]) -> None:
        """Which slots have a live agent now; told at each change."""
        ...

    def gone(self) -> str | None:
        """Why nothing can be launched any more, ever; None: it can, as far as is known. Takes a second at most."""
        ...

    def could_not_submit(self, slot: SlotId) -> bool:
        """Whether the slot's last launch failed here, in the driver, before anybody else had a part in it."""
        ...

    def close(self, deadline_s: float) -> None:
        """End everything and wait up to `deadline_s` for it. Later launches end at once. Repeats are harmless."""
        ...

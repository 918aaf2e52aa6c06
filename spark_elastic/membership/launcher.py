"""The interface to whatever starts agents: Spark's launchers, and `driver.launcher` for this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spark_elastic.membership.reasons import LossCause
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId


@dataclass(frozen=True, slots=True)
class LaunchEnd:
    """The end of one launch of a slot."""

    slot: SlotId
    cause: LossCause
    outcome: AgentOutcome | None = None  # the agent's return value; None if it was lost, failed or never began
    submitted: bool = True  # false: the launch failed in the driver itself, before any executor or process was involved


OnEnded = Callable[[LaunchEnd], None]
"""Called once for each `Launcher.launch` when that launch is over, from any thread. By then the slot can be launched
again."""


class Launcher(Protocol):
    """Starts one agent per slot. No call blocks on a cluster; the end of each launch is reported to an `OnEnded`."""

    def launch(self, slot: SlotId) -> None:
        """Start the slot's agent. Raise ValueError if the slot's previous launch is not over."""

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        """End the slot's launch, pending or running. No effect if it is over."""

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        """Return True if an agent that has connected belongs to a current launch; False if it must be sent away."""

    def agent_present(self, slot: SlotId, present: bool) -> None:
        """Take note that the slot has a live agent from now on, or (False) that it has none any more."""

    def gone(self) -> str | None:
        """Return why nothing can ever be launched again; None: not known to be so. Blocks for a second at most."""

    def close(self, deadline_s: float) -> None:
        """End all launches and wait for that up to `deadline_s`. Later launches end at once. May be called again."""

"""An agent that does as its payload says, and a recorder for the ends of launches."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_elastic.membership.launcher import LaunchEnd
from spark_elastic.membership.reasons import loss_in_words
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.spark import discovery
from spark_elastic.spark.discovery import Look, Probe, SlotWait
from spark_elastic.spark.executor_process import look_at_slot
from spark_elastic.spark.session import cluster_of
from tests.integration.processes import wait_until

WAIT_S = 60.0
"""For anything that a test waits for; it fails then."""


def fake_agent(slot: int, launch: int, payload: bytes) -> AgentOutcome:
    """Payload "verb argument": return TEXT, pid, big BYTES, raise TEXT, exit CODE, missing MODULE, stay FOLDER."""
    verb, _, argument = payload.decode().partition(" ")
    if verb == "return":
        return AgentOutcome(slot, argument.encode(), "done")
    if verb == "pid":
        return AgentOutcome(slot, str(os.getpid()).encode(), "done")
    if verb == "big":
        return AgentOutcome(slot, bytes(int(argument)), "done")
    if verb == "raise":
        raise ArithmeticError(argument)
    if verb == "exit":
        os._exit(int(argument))
    if verb == "missing":
        raise ModuleNotFoundError(f"No module named '{argument}'", name=argument)
    started = Path(argument) / f"slot-{slot}-{time.time_ns()}"
    being_written = started.with_name(f".{started.name}")
    being_written.write_text(str(os.getpid()))
    being_written.rename(started)  # so that nobody reads half of it
    time.sleep(600)
    raise AssertionError("nobody ended the fake agent")


@dataclass
class Ends:
    """Collects what `on_ended` is told."""

    seen: list[tuple[int, str, AgentOutcome | None, float]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, end: LaunchEnd) -> None:
        with self.lock:
            self.seen.append((end.slot, loss_in_words(end.cause), end.outcome, time.monotonic()))

    def wait_for(self, count: int, timeout_s: float = WAIT_S) -> list[tuple[int, str, AgentOutcome | None, float]]:
        wait_until(lambda: len(self.seen) >= count, timeout_s, f"{count} ends (had {self.seen})")
        return list(self.seen)


def started(folder: Path, count: int, timeout_s: float = WAIT_S) -> dict[int, int]:
    """Slot → pid, once `count` agents stay."""
    wait_until(lambda: len(list(folder.glob("slot-*"))) >= count, timeout_s, f"{count} agents are up")
    return {int(path.name.split("-")[1]): int(path.read_text()) for path in folder.glob("slot-*")}


def probe(sc: Any, num_proc: int, timeout_s: float, look: Look = look_at_slot) -> Probe:
    """Place tasks together, as a job does before it starts."""
    return discovery.probe(cluster_of(sc), look, num_proc, timeout_s, SlotWait())

"""The membership timeline: typed records of what happened to the world. `str(record)` is its line in a log.

`at` and other times are those of the membership machine; the driver turns them into wall-clock time for people.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_elastic.membership.reasons import (
    LossCause,
    Wait,
    WorldChange,
    change_in_words,
    counted,
    crashes_in_words,
    failures_in_words,
    loss_in_words,
    wait_in_words,
)
from spark_elastic.membership.topology import Place, WorkerId


@dataclass(frozen=True, slots=True)
class Record:
    """The base of all records."""

    at: float

    def shifted(self, seconds: float) -> Record:
        """Return the record with all its times moved by some seconds, to those of another clock."""
        times = {name: getattr(self, name, None) for name in ("at", "deadline", "until")}
        return replace(self, **{name: time + seconds for name, time in times.items() if time is not None})


@dataclass(frozen=True, slots=True)
class WorkerJoined(Record):
    """A worker is ready to train and waits for a world."""

    worker: WorkerId
    place: Place

    def __str__(self) -> str:
        return f"worker {self.worker} is ready on {self.place.host} (executor {self.place.executor})"


@dataclass(frozen=True, slots=True)
class WorkerLeft(Record):
    """A worker is gone: it was lost or removed, or it left as planned."""

    worker: WorkerId
    place: Place
    rank: int | None  # its rank in the newest world; None: it was not a member
    cause: LossCause
    graceful: bool  # the worker left at a step boundary, or no world needed it: not a failure

    @property
    def why(self) -> str:
        """The cause in words."""
        return loss_in_words(self.cause)

    def __str__(self) -> str:
        name = f"worker {self.worker}" if self.rank is None else f"rank {self.rank}"
        how = "left" if self.graceful else "is lost"
        return f"{name} on {self.place.host} (executor {self.place.executor}) {how}: {self.why}"


@dataclass(frozen=True, slots=True)
class WorldStarted(Record):
    """A world was published."""

    round: int
    size: int
    root: int  # the rank whose state the others take over
    progress: int | None  # optimizer steps in that state; None: no member holds a state yet
    sync: bool  # the others receive the whole state of the root. False: all members hold the same version
    pause_s: float | None  # time since the world before broke or its first member stopped; None for the first world
    change: WorldChange

    @property
    def why(self) -> str:
        """The reason for the world, in words."""
        return change_in_words(self.change)

    def __str__(self) -> str:
        state = "" if self.progress is None else f" at step {self.progress}"
        pause = "" if self.pause_s is None else f" after a pause of {self.pause_s * 1000:.0f} ms"
        return f"round {self.round}: {counted(self.size, 'worker')}{state}{pause} ({self.why})"


@dataclass(frozen=True, slots=True)
class WorldBroken(Record):
    """A world broke: its surviving members close its connections and wait for the next round."""

    round: int
    size: int
    change: WorldChange

    @property
    def why(self) -> str:
        """The reason, in words."""
        return change_in_words(self.change)

    def __str__(self) -> str:
        return f"round {self.round} of {counted(self.size, 'worker')} is broken: {self.why}"


@dataclass(frozen=True, slots=True)
class CooldownStarted(Record):
    """A slot, executor or host failed and is not used before `until`."""

    kind: str  # one of "slot", "executor" and "host"
    name: str
    failures: int
    until: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {failures_in_words(self.failures, self.until - self.at)}"


@dataclass(frozen=True, slots=True)
class HostExcluded(Record):
    """Consecutive worlds crashed on the host, and other hosts are used before `until`."""

    host: str
    worlds: int
    until: float

    def __str__(self) -> str:
        return f"host {self.host} is left alone for {self.until - self.at:.0f} s: {crashes_in_words(self.worlds)}"


@dataclass(frozen=True, slots=True)
class WaitChanged(Record):
    """The job waits, until `deadline` at most. Announced whenever the reason or the deadline changes."""

    wait: Wait
    deadline: float | None

    @property
    def reason(self) -> str:
        """What is waited for, in words."""
        return wait_in_words(self.wait)

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class DriverStoodStill(Record):
    """The driver process did not run for `seconds`, and removed no worker for its silence during that time."""

    seconds: float

    def __str__(self) -> str:
        return f"the driver stood still for {self.seconds:.1f} s; its workers trained on"


@dataclass(frozen=True, slots=True)
class JobEnded(Record):
    """The job finished or failed."""

    outcome: str  # either "finished" or "failed"
    why: str

    def __str__(self) -> str:
        # an error of the user's function ends with its whole traceback, which whoever catches the error gets to see
        return f"the job {self.outcome}: {self.why.partition(chr(10))[0]}"

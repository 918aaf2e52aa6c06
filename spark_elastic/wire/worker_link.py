"""What a framework frontend (torch, tensorflow) knows of the job it runs in.

`task.worker` installs the link before it calls the user's function. Without one (a plain Python process) a frontend
runs as a world of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spark_elastic.membership.topology import StateVersion, WorkerId, World
from spark_elastic.wire.messages import EpochEnded, LiveProgress, Notice

# The elastic loops of this process: their numbers, and what those that are over have left behind.
#
# When a world breaks after a loop, the user's function is called again in the same process. Up to the loop it does
# its
# work anew; at the loop it takes up the state and the result that are kept here, and what comes after is done again.
# `task.worker` calls the function, `state.elastic_loop` enters and finishes the loops.


@dataclass(frozen=True, slots=True)
class FinishedLoop:
    """state: as the loop has left it, saved; None: this process was not in the loop and has only its result."""

    state: Any
    result: Any


class Loops:
    """Loops are numbered from 1 in the order in which one call of the user's function enters them."""

    def __init__(self) -> None:
        self.entered = 0
        """The newest loop that this call of the function has entered; 0: none."""
        self._finished: list[FinishedLoop] = []
        self._has_joined = True
        self.on_run_again: Callable[[], None] | None = None
        """Set by the frontend: leave the world, and do without one until a loop is entered."""

    def enter(self) -> int:
        """Return the number of the loop that is entered now."""
        self.entered += 1
        return self.entered

    def kept(self, number: int) -> FinishedLoop | None:
        """What the loop has left behind in an earlier call of the function; None: it was not finished in one."""
        return self._finished[number - 1] if number <= len(self._finished) else None

    @property
    def last(self) -> int:
        """The newest loop that was finished here; 0: none."""
        return len(self._finished)

    @property
    def unbroken(self) -> bool:
        """Whether this process was in every loop that is behind it; what it builds rests on their states then."""
        return all(loop.state is not None for loop in self._finished)

    def finish(self, number: int, state: Any, result: Any) -> None:
        """Keep what the loop has come to."""
        self._finished[number - 1 :] = [FinishedLoop(state, result)]

    def joined(self) -> None:
        """This process is a member of a world."""
        self._has_joined = True

    @property
    def waits_for_loop(self) -> bool:
        """Whether the function was called again and has not come to a world since."""
        return not self._has_joined

    @property
    def can_run_again(self) -> bool:
        """Whether the function can be called again here: a loop is finished, and the last call came to one."""
        return bool(self._finished) and self._has_joined

    def run_again(self) -> None:
        """The function is about to be called again."""
        self.entered = 0
        self._has_joined = False
        if self.on_run_again is not None:
            self.on_run_again()


loops = Loops()
"""Those of this process."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A world and what is needed to connect in it."""

    world: World
    worker: WorkerId
    addresses: dict[WorkerId, str]
    """The address that each member binds to."""
    updates_seen: int = 0
    """`updates_seen()` at the moment this world arrived: those updates are part of it already."""


@dataclass(frozen=True, slots=True)
class ProvisionalPosition:
    """The position a newcomer will probably get in a world that runs without it."""

    rank: int
    size: int
    loop: int = 1
    """Number of the elastic loop that the job is in."""


class WorkerLink(Protocol):
    """The worker's side of the channel to the driver. Every blocking call ends when the job does.

    `kv_set` and `kv_get` are called from more than one thread.
    """

    @property
    def worker(self) -> WorkerId: ...

    def join_at_init(self) -> Assignment | ProvisionalPosition:
        """Called by `init()`: blocks until a first world is published, or at once if one is running."""
        ...

    def join(
        self,
        round: int,
        version: StateVersion | None,
        loop: int = 1,
        meanwhile: Callable[[], None] | None = None,
    ) -> Assignment | ProvisionalPosition:
        """Called by the elastic loop of that number, or by `init()` (0): says READY and waits for a newer world.

        Calls `meanwhile` between the two.

        Returns: a provisional position if the job is in a later loop than this, which is the one to come to then.
        """
        ...

    def report_version(self, version: StateVersion) -> None:
        """Note the version of the state held here, which is sent with the next heartbeat, the first one at once."""
        ...

    def entered_loop(self) -> None:
        """An elastic loop was entered: this worker's state can be recovered from now on."""
        ...

    def left_loop(self) -> None:
        """The elastic loop has returned: what the function does now is waited for if the world breaks."""
        ...

    def offer_loop_result(self, loop: int, problem: str, result: bytes) -> None:
        """Give the driver what the loop returned, for newcomers to later loops; or say why that is not possible."""
        ...

    def loop_result(self, loop: int, timeout_s: float) -> tuple[str, bytes]:
        """What another worker has offered of a loop that this one was sent past: (problem, result).

        Raises: TimeoutError: nothing came within `timeout_s`.
        """
        ...

    def blocked(self, waiting: bool) -> None:
        """The training thread begins or ends to wait in a collective, for others. Cheap; sent with the heartbeats."""
        ...

    @property
    def stall_timeout_s(self) -> float:
        """How long the driver lets a collective be waited for before it removes somebody."""
        ...

    def updates_seen(self) -> int:
        """The newest hosts-updated sequence number (0: none). Cheap: no lock, no I/O."""
        ...

    def cut_round(self) -> int:
        """The newest round that the driver ordered to cut (0: none). Cheap."""
        ...

    def on_cut(self, callback: Callable[[int, str], None] | None) -> None:
        """Have `callback(round, why)` called from the channel thread the moment a cut arrives; None: no more.

        Called at once if the cut of the newest round came before the registration.
        """
        ...

    def derive_key(self, purpose: str) -> bytes:
        """32 bytes that only this job's workers know: HMAC-SHA256 of the job's key over `purpose`.

        Pickled objects that travel between workers carry a MAC under it, so none is loaded that came from elsewhere.
        """
        ...

    def show(self, what: LiveProgress | EpochEnded | Notice) -> bool:
        """Have the driver show it. Blocks if the channel does, so not for the training thread.

        Returns: whether it was sent; not if there is no channel any more.
        """
        ...

    def kv_set(self, round: int, key: str, value: bytes) -> None: ...

    def kv_get(self, round: int, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Blocks until every key is set.

        Raises:
            HorovodInternalError: the round was cut or replaced meanwhile.
            TimeoutError: a key was not set within `timeout_s`.
        """
        ...


_link: WorkerLink | None = None


def install(link: WorkerLink | None) -> None:
    """Make `link` the one that frontends in this process use."""
    global _link
    _link = link


def current() -> WorkerLink | None:
    """The link of this process; None outside of a job."""
    return _link

"""The interface of a worker to its job: the link to the driver.

`task.main` installs the link before it calls the user's function. A plain Python process has none and runs as a world
of one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spark_elastic.membership.topology import StateVersion, WorkerId, World
from spark_elastic.wire.messages import EpochEnded, LiveProgress, Notice

log = logging.getLogger("spark_elastic")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A world, and the addresses that its members bind to."""

    world: World
    worker: WorkerId
    addresses: Sequence[str]
    """The address that each member binds to, by rank."""
    updates_seen: int = 0
    """`updates_seen()` when this world arrived: it includes those updates."""


@dataclass(frozen=True, slots=True)
class ProvisionalPosition:
    """The probable position of a newcomer, while a world runs without it."""

    rank: int
    size: int
    loop: int = 1
    """Number of the elastic loop that the job is in."""


class WorkerLink(Protocol):
    """The worker's side of the channel to the driver. Every blocking call ends when the job does.

    `kv_set`, `kv_get` and `gather` are called from more than one thread.
    """

    @property
    def worker(self) -> WorkerId: ...

    def join_at_init(self) -> Assignment | ProvisionalPosition:
        """Wait until a first world is published; return at once if one runs an elastic loop. Called by `init()`."""
        ...

    def join(
        self,
        round: int,
        version: StateVersion | None,
        loop: int = 1,
        meanwhile: Callable[[], None] | None = None,
    ) -> Assignment | ProvisionalPosition:
        """Report READY and wait for a newer world.

        Args:
            round: The round of the last world, 0 if there was none.
            version: Version of the state held here.
            loop: Number of the elastic loop that calls this; 0: `init()` calls it.
            meanwhile: A function to call between the report and the wait.

        Returns:
            The world; a provisional position if the job is in a later loop, to which the function has to skip.
        """
        ...

    def report_version(self, version: StateVersion) -> None:
        """Send the version of the state held here with the next heartbeat.

        It is sent at once if this worker held no state before, and on ranks 0 and 1 at the beginning of a world and
        after its first step.
        """
        ...

    def entered_loop(self) -> None:
        """Record that an elastic loop was entered: this worker's state can be recovered from now on."""
        ...

    def left_loop(self) -> None:
        """Record that the elastic loop has returned.

        If the world breaks now, the driver gives the function time to return instead of removing this worker.
        """
        ...

    def offer_loop_result(self, loop: int, problem: str, result: bytes) -> None:
        """Give the driver the loop's result, for newcomers to later loops.

        Args:
            loop: Number of the loop.
            problem: Why there is no result to give; "" if there is one.
            result: The pickled result, after a MAC made with the job's key; empty if there is a problem.
        """
        ...

    def loop_result(self, loop: int, timeout_s: float) -> tuple[str, bytes]:
        """Return the (problem, result) that another worker has offered of a loop that this one skips.

        Raises:
            TimeoutError: Nothing arrived within `timeout_s`.
        """
        ...

    def blocked(self, waiting: bool) -> None:
        """Record that the training thread begins or ends to wait in a collective. Cheap; sent with the heartbeats."""
        ...

    @property
    def stall_timeout_s(self) -> float:
        """Time that a collective may take before the driver removes a worker."""
        ...

    def updates_seen(self) -> int:
        """Return the newest hosts-updated sequence number (0: none). Cheap: no lock, no I/O."""
        ...

    def cut_round(self) -> int:
        """Return the number of the newest round that the driver has ended with a `Cut` message (0: none). Cheap."""
        ...

    def on_cut(self, callback: Callable[[int, str], None] | None) -> None:
        """Call `callback(round, why)` from the channel's thread when a `Cut` message arrives; None: call nothing.

        The callback is called at once if the newest round was ended before the registration.
        """
        ...

    def derive_key(self, purpose: str) -> bytes:
        """Return 32 bytes that only this job's workers know: HMAC-SHA256 of the job's key over `purpose`.

        Pickled objects sent between workers carry a MAC under it, so that no object of another origin is loaded.
        """
        ...

    def show(self, what: LiveProgress | EpochEnded | Notice) -> bool:
        """Send the driver something to display. Blocks if the channel does, so not for the training thread.

        Returns:
            True if it was sent; False if the channel is closed.
        """
        ...

    def report_epoch(self, epoch: int, row: bytes) -> None:
        """Send an epoch's row of the history to the callbacks on the driver."""
        ...

    def ask_after_epoch(self, epoch: int, row: bytes, timeout_s: float) -> str:
        """Send an epoch's row, and wait for the decision of the callbacks on the driver.

        Returns:
            The reason to end the training after this epoch; "" to continue, also if no decision came in time.

        Raises:
            HorovodInternalError: The driver has ended the round.
        """
        ...

    def kv_set(self, round: int, key: str, value: bytes) -> None: ...

    def gather(self, round: int, name: str, rank: int, size: int, value: str, timeout_s: float) -> Sequence[str]:
        """Return the values of all members of a group, by rank; each of them calls this.

        Args:
            round: The round of the world.
            name: Identifies the group among those of the round.
            rank: This process's rank in the group.
            size: The number of members.
            value: This process's value.
            timeout_s: How long to wait for the others.

        Raises:
            HorovodInternalError: The driver has ended the round, or published a newer one.
            TimeoutError: A member did not send its value within `timeout_s`.
        """
        ...

    def kv_get(self, round: int, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Wait until every key is set, and return their values.

        Raises:
            HorovodInternalError: The driver has ended the round, or published a newer one.
            TimeoutError: A key was not set within `timeout_s`.
        """
        ...


MAX_NOTICE = 1000
"""Characters of a notice that are sent to the driver."""
_link: WorkerLink | None = None


def install(link: WorkerLink | None) -> None:
    """Make `link` the one that this process uses."""
    global _link
    _link = link


def current() -> WorkerLink | None:
    """Return the link of this process; None outside of a job."""
    return _link


def notify(text: str) -> None:
    """Log a warning here, and have the driver show it as a line and record it as an event of the job."""
    log.warning("%s", text)
    if _link is not None:
        _link.show(Notice(text[:MAX_NOTICE]))

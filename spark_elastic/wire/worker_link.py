"""A worker's link to the driver, over its channel.

`task.main` installs the link before it calls the user's function. A plain Python process has none and runs as a world
of one.

One condition guards the fields that the channel's reader thread writes and the training thread reads.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spark_elastic import clock
from spark_elastic.errors import ChannelClosedError, HorovodInternalError, ProtocolError, UsageError
from spark_elastic.membership.topology import StateVersion, WorkerId, World
from spark_elastic.wire import messages as wire
from spark_elastic.wire.channel import Channel

MAX_ERROR_CHARACTERS = 200_000  # limit of an exception's message, and of its traceback: some quote a whole batch
MAX_NOTICE = 1000  # characters of a notice that are sent to the driver

log = logging.getLogger("spark_elastic")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A world, and the addresses that its members bind to."""

    world: World
    worker: WorkerId
    addresses: Sequence[str]  # the address that each member binds to, by rank
    updates_seen: int = 0  # `updates_seen()` when this world arrived: it includes those updates


class WorkerLink:
    """The worker's side of the channel to the driver: worlds, notifications and key-value pairs.

    Every blocking call ends when the job does. `kv_set`, `kv_get` and `gather` are called from more than one thread.
    `on_closed` is called with the reason when the channel breaks before the function has returned.
    """

    def __init__(self, worker: WorkerId, channel: Channel, key: bytes, on_closed: Callable[[str], None]) -> None:
        self.worker = worker
        self._closed = on_closed
        self._key = key
        self._channel = channel
        self._changed = threading.Condition()
        self._assignment: Assignment | None = None
        self._provisional: wire.Provisional | None = None
        self._updates_seen = 0
        self._cut_round = 0
        self._cut_why = ""
        #: Called with a round and the reason, on the channel's thread, when the driver has ended the round.
        self.on_cut: Callable[[int, str], object] = lambda round, why: None
        #: The driver's answers: values by key, the values of a group by its round and name, decisions by epoch.
        self._replies: dict[str | tuple[int, str] | int, Any] = {}
        self._version: StateVersion | None = None
        #: The state that the current world starts from; None once this worker has applied a step in it.
        self._starts_at: StateVersion | None = None
        self._begun = 0  # the newest round in which this worker has reported its state
        self.has_loop = False  # true once an elastic loop was entered
        self._blocked_since: float | None = None
        self._after_loop = False
        self._loop_results: dict[int, wire.LoopResult] = {}
        #: Called with the number of the call, on the channel's thread, when the driver has the function called again.
        self.on_run_again: Callable[[int], object] = lambda run: None
        #: Called on the channel's thread when the driver announces that the world is about to change.
        self.on_update: Callable[[], object] = lambda: None
        self.restarts_world = False  # this process is in one world only: the next one has new processes
        self._ending = False
        self._in_child = False  # this is a forked child of the worker, whose channel is the parent's
        self._beat_now = threading.Event()
        self.stall_timeout_s = 0.0  # time that a collective may take before the driver removes a worker

    def start(self) -> None:
        """Send the hello, and start to receive messages. Heartbeats begin with the driver's welcome."""
        os.register_at_fork(after_in_child=self._forked)
        self._channel.start(self._on_message, self._on_closed)
        self._channel.send(wire.WorkerHello(self.worker))

    def join_at_init(self) -> Assignment | wire.Provisional:
        """Wait until a first world is published; return at once if one runs an elastic loop. Called by `init()`."""
        self._send(wire.Ready(0, None, at_init=True, loop=1))
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None or self._provisional is not None)
            position = self._assignment or self._provisional
        assert position is not None
        return position

    def join(
        self, round: int, version: StateVersion | None, loop: int = 1, meanwhile: Callable[[], None] | None = None
    ) -> Assignment | wire.Provisional:
        """Report READY, with the version of the state held here, and wait for a newer world than that of `round`.

        Round 0: there was none. `loop` is the number of the elastic loop that calls this; 0: `init()` does. `meanwhile`
        is called before the wait. Returns a provisional position if the job is in a later loop, to which the function
        has to skip.
        """
        self._version = version
        self._send(wire.Ready(round, version, at_init=False, loop=loop))
        if meanwhile is not None:
            meanwhile()
        with self._changed:
            while self._newest_round() <= round:
                if self._provisional is not None and self._provisional.loop > loop:
                    return self._provisional
                self._changed.wait()
            assert self._assignment is not None
            self._starts_at = self._assignment.world.version
            return self._assignment

    def report_version(self, version: StateVersion) -> None:
        """Send the version of the state held here with the next heartbeat.

        It is sent at once if this worker held no state before, and on ranks 0 and 1 at the beginning of a world and
        after its first step.
        """
        before = self._version
        if before is not None and version < before:  # back to a commit: the driver counts the steps that are lost
            self._send(wire.WorkerHeartbeat(before, None, self._after_loop, self._begun))
        self._version = version
        told_at_once = self._begun < self._newest_round()  # from here on, a loss is that of a world that trains
        self._begun = max(self._begun, self._newest_round())
        if self._starts_at is not None and version.is_steps_after(self._starts_at):
            self._starts_at = None
            told_at_once = True  # the first step in this world: the driver measures the pause by it
        # Two members are enough, also if one dies at once. All of them would delay one another's first step.
        if told_at_once and self._assignment is not None and self._assignment.world.member(self.worker).rank < 2:
            self._beat_now.set()
        if before is None or (not before.trained and version.trained):
            self._beat_now.set()  # from here on there is a state to lose

    def entered_loop(self) -> None:
        """Record that an elastic loop was entered: this worker's state can be recovered from now on."""
        self.has_loop = True
        self._after_loop = False

    def left_loop(self) -> None:
        """Record that the elastic loop has returned.

        If the world breaks now, the driver gives the function time to return instead of removing this worker.
        """
        self._after_loop = True
        self._beat_now.set()

    def offer_loop_result(self, loop: int, problem: str, result: bytes) -> None:
        """Give the driver the loop's result, for newcomers to later loops; or the `problem` why there is none to give.

        The result is pickled, after a MAC made with the job's key.
        """
        self._send(wire.LoopResult(loop, problem, result))

    def loop_result(self, loop: int, timeout_s: float) -> tuple[str, bytes]:
        """Return the (problem, result) offered of a loop that is skipped here; raise TimeoutError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: loop in self._loop_results, timeout_s):
                raise TimeoutError(f"the result of elastic loop {loop} did not arrive within {timeout_s:.0f} s")
            found = self._loop_results[loop]
        return found.problem, found.payload

    def blocked(self, waiting: bool) -> None:
        """Record that the training thread begins or ends to wait in a collective. Cheap; sent with the heartbeats."""
        self._blocked_since = clock.monotonic() if waiting else None

    def updates_seen(self) -> int:
        """Return the newest hosts-updated sequence number (0: none). Cheap: no lock, no I/O."""
        return self._updates_seen

    def check_cut(self, round: int) -> None:
        """Raise HorovodInternalError if the driver has ended the round. Cheap: no lock, no I/O."""
        if self._cut_round >= round:
            raise HorovodInternalError(f"round {round} is over: {self._cut_why}")

    def derive_key(self, purpose: str) -> bytes:
        """Return 32 bytes that only this job's workers know: HMAC-SHA256 of the job's key over `purpose`.

        Pickled objects between workers carry a MAC under it, so that no object of another origin is loaded.
        """
        return hmac.digest(self._key, f"derived for {purpose}".encode(), "sha256")

    def show(self, what: wire.LiveProgress | wire.EpochEnded | wire.Notice) -> bool:
        """Send the driver something to display; return False if the channel is closed. Blocks if the channel does."""
        try:
            self._channel.send(what)
        except (ChannelClosedError, ProtocolError):
            return False  # it is only displayed; the reader thread acts on a broken channel
        return True

    def report_epoch(self, epoch: int, row: bytes, wait_s: float = 0.0) -> str:
        """Send an epoch's row of the history to the callbacks on the driver, and wait that long for their decision.

        Returns the reason to end the training after this epoch; "" to continue, also if no decision came in time.
        Raises HorovodInternalError if the driver has ended the round.
        """
        with self._changed:
            self._replies.pop(epoch, None)
            round = self._newest_round()
        self._send(wire.EpochRow(epoch, wait_s > 0, row))
        try:
            return str(self._await_in_round(round, epoch, wait_s, f"decision on epoch {epoch}")) if wait_s > 0 else ""
        except TimeoutError:
            return ""

    def kv_set(self, round: int, key: str, value: bytes) -> None:
        """Set a value in the round's key-value store at the driver."""
        self._send(wire.KvSet(round, key, value))

    def kv_get(self, round: int, key: str, timeout_s: float) -> bytes:
        """Wait until the key is set, and return its value.

        Raises:
            HorovodInternalError: The driver has ended the round, or published a newer one.
            TimeoutError: The key was not set within `timeout_s`.
        """
        self._send(wire.KvGet(round, key))
        value: bytes = self._await_in_round(round, key, timeout_s, f"value of {key}")
        return value

    def gather(self, round: int, name: str, rank: int, size: int, value: str, timeout_s: float) -> Sequence[str]:
        """Return the values of all members of a round's group `name`, by rank; each calls this. Raises as `kv_get`."""
        self._send(wire.KvGather(round, name, rank, size, value))
        what = f"values of all {size} members of {name}"
        found: tuple[str, ...] = self._await_in_round(round, (round, name), timeout_s, what)
        return found

    def _await_in_round(self, round: int, key: str | tuple[int, str] | int, timeout_s: float, what: str) -> Any:
        """Wait for the driver's reply under that key, and remove it. Raises as `kv_get` does."""
        deadline = clock.monotonic() + timeout_s
        with self._changed:
            while key not in self._replies:
                if self._is_over(round):
                    raise HorovodInternalError(f"round {round} has ended: {self._cut_why}")
                left = deadline - clock.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no {what} within {timeout_s:.0f} s in round {round}")
                self._changed.wait(left)
            return self._replies.pop(key)

    def raised(self, error: BaseException, traceback: str, exit_code: int | None = None) -> None:
        """Report an exception of the user's function, shortened if it is long. `exit_code`: of a script that exited."""
        try:
            text = str(error)
        except Exception as problem:
            text = f"(str() of the exception failed: {problem!r})"
        text, traceback = text[:MAX_ERROR_CHARACTERS], traceback[-MAX_ERROR_CHARACTERS:]
        self._send(wire.Raised(type(error).__name__, text, traceback, exit_code))

    def abandoned(self, why: str) -> None:
        """Report that the function has to be run again from its start, in a new process."""
        self._send(wire.Abandoned(why))

    def returned(self, over: bool) -> None:
        """Record whether the user's function is over: then a closed channel is harmless, and else ends the process."""
        self._ending = over
        if not over:
            self._after_loop = False
            self._beat_now.set()

    def _is_over(self, round: int) -> bool:
        return self._cut_round >= round or self._newest_round() > round

    def _newest_round(self) -> int:
        return self._assignment.world.round if self._assignment is not None else 0

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.Welcome(interval_s, silence_limit_s, stall_timeout_s):
                self._channel.set_silence_limit(silence_limit_s)
                self.stall_timeout_s = stall_timeout_s
                beat = threading.Thread(target=self._beat, args=(interval_s,), name="spark_elastic-beat", daemon=True)
                beat.start()
            case wire.Cut(round, why):
                with self._changed:
                    self._cut_why, self._cut_round = why, max(self._cut_round, round)
                    self._changed.notify_all()
                self.on_cut(round, why)
            case wire.Goodbye(why):
                self._on_closed(why)
            case wire.HostsUpdated(sequence):
                self._updates_seen = max(self._updates_seen, sequence)
                self.on_update()
            case wire.RunAgain(run):
                self.on_run_again(run)
            case _:
                with self._changed:
                    self._store(message)
                    self._changed.notify_all()

    def _store(self, message: wire.Message) -> None:
        match message:
            case wire.WorldAssigned(world, addresses):
                self._assignment = Assignment(world, self.worker, addresses, self._updates_seen)
                self._replies.clear()
            case wire.Provisional():
                self._provisional = message
            case wire.LoopResult(loop):
                self._loop_results[loop] = message
            case wire.EpochDecision(epoch, stop):
                self._replies[epoch] = stop
            case wire.KvValue(key, value):
                self._replies[key] = value
            case wire.KvGathered(round, name, values):
                self._replies[round, name] = values

    def _beat(self, interval_s: float) -> None:
        while True:
            try:
                since = self._blocked_since
                blocked_s = None if since is None else clock.monotonic() - since
                self._channel.send(wire.WorkerHeartbeat(self._version, blocked_s, self._after_loop, self._begun))
            except ChannelClosedError:
                return  # the reader thread ends the process
            self._beat_now.wait(interval_s)
            self._beat_now.clear()

    def _send(self, message: wire.Message) -> None:
        if self._in_child:
            raise UsageError(
                "a forked child of a worker has no connection to the driver: call commit, check_host_updates and "
                "hvd's functions in the worker itself"
            )
        try:
            self._channel.send(message)
        except ProtocolError as error:
            self._on_closed(str(error))

    def _forked(self) -> None:
        self._in_child = True  # a frame of the child's would look like one that was altered on its way

    def _on_closed(self, why: str) -> None:
        if not self._ending:
            self._closed(why)


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
        _link.show(wire.Notice(text[:MAX_NOTICE]))

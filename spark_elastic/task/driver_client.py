"""A worker's link to the driver: worlds, notifications and key-value pairs over its channel.

One condition guards the fields that the channel's reader thread writes and the training thread reads. When the channel
breaks, the process ends: without it the worker can neither report progress nor learn of a new world.
"""

from __future__ import annotations

import hmac
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from spark_elastic import clock
from spark_elastic.errors import ChannelClosedError, HorovodInternalError, ProtocolError
from spark_elastic.membership.topology import StateVersion, WorkerId
from spark_elastic.task import reaper
from spark_elastic.task.script import ScriptExit
from spark_elastic.wire.channel import Channel
from spark_elastic.wire.messages import (
    Abandoned,
    Cut,
    EpochDecision,
    EpochEnded,
    EpochRow,
    Goodbye,
    HostsUpdated,
    KvGather,
    KvGathered,
    KvGet,
    KvSet,
    KvValues,
    LiveProgress,
    LoopResult,
    Message,
    Notice,
    Provisional,
    Raised,
    Ready,
    RunAgain,
    WorkerHeartbeat,
    WorkerHello,
    WorkerWelcome,
    WorldAssigned,
)
from spark_elastic.wire.worker_link import Assignment, ProvisionalPosition

EXIT_CHANNEL_LOST = 79
"""Exit code of a worker whose channel to the driver broke."""
MAX_ERROR_CHARACTERS = 200_000
"""Limit of an exception's message, and of its traceback: some quote a whole batch."""


class ChannelLink:
    """The `worker_link.WorkerLink` of a worker in a job, over its channel to the driver."""

    def __init__(self, worker: WorkerId, channel: Channel, key: bytes) -> None:
        self.worker = worker
        self._key = key
        self._channel = channel
        self._changed = threading.Condition()
        self._assignment: Assignment | None = None
        self._provisional: ProvisionalPosition | None = None
        self._updates_seen = 0
        self._cut_round = 0
        self._cut_why = ""
        self._cut_callback: Callable[[int, str], None] | None = None
        self._replies: dict[int, KvValues] = {}
        self._gathered: dict[tuple[int, str], tuple[str, ...]] = {}
        """The values of groups, by round and name."""
        self._next_request = 0
        self._decisions: dict[int, str] = {}
        """The driver's decisions about epochs that this worker has asked about."""
        self._version: StateVersion | None = None
        self._starts_at: StateVersion | None = None
        """The state that the current world starts from; None once this worker has applied a step in it."""
        self._begun = 0
        """The newest round in which this worker has reported its state."""
        self.in_loop = False
        """True once an elastic loop was entered."""
        self._blocked_since: float | None = None
        self._after_loop = False
        self._loop_results: dict[int, LoopResult] = {}
        self._run_again: Callable[[int], None] = lambda run: None  # the function has not returned yet
        self._ending = False
        self._beat_now = threading.Event()
        self.stall_timeout_s = 0.0

    def start(self) -> None:
        """Send the hello, and start to receive messages. Heartbeats begin with the driver's welcome."""
        self._channel.start(self._on_message, self._on_closed, name="link")
        self._channel.send(WorkerHello(self.worker, os.getpid()))

    # --- WorkerLink -----------------------------------------------------------------------------------

    def join_at_init(self) -> Assignment | ProvisionalPosition:
        self._send(Ready(0, None, at_init=True, loop=1))
        with self._changed:
            self._changed.wait_for(lambda: self._assignment is not None or self._provisional is not None)
            position = self._assignment or self._provisional
        assert position is not None
        return position

    def join(
        self,
        round: int,
        version: StateVersion | None,
        loop: int = 1,
        meanwhile: Callable[[], None] | None = None,
    ) -> Assignment | ProvisionalPosition:
        self._version = version
        self._send(Ready(round, version, at_init=False, loop=loop))
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
        before = self._version
        if before is not None and version < before:  # back to a commit: the driver counts the steps that are lost
            self._send(WorkerHeartbeat(before, None, self._after_loop, self._begun))
        self._version = version
        told_at_once = False
        if self._begun < self._newest_round():
            self._begun = self._newest_round()
            told_at_once = True  # from here on, a loss is the loss of a world that trains
        if self._starts_at is not None and version.is_steps_after(self._starts_at):
            self._starts_at = None
            told_at_once = True  # the first step in this world: the driver measures the pause by it
        # Two members are enough, also if one dies at once. All of them would delay one another's first step.
        if told_at_once and self._assignment is not None and self._assignment.world.member(self.worker).rank < 2:
            self._beat_now.set()
        if before is None or (not before.trained and version.trained):
            self._beat_now.set()  # from here on there is a state to lose

    def entered_loop(self) -> None:
        self.in_loop = True
        self._after_loop = False

    def left_loop(self) -> None:
        self._after_loop = True
        self._beat_now.set()

    def offer_loop_result(self, loop: int, problem: str, result: bytes) -> None:
        self._send(LoopResult(loop, problem, result))

    def loop_result(self, loop: int, timeout_s: float) -> tuple[str, bytes]:
        with self._changed:
            if not self._changed.wait_for(lambda: loop in self._loop_results, timeout_s):
                raise TimeoutError(f"the result of elastic loop {loop} did not arrive within {timeout_s:.0f} s")
            found = self._loop_results[loop]
        return found.problem, found.payload

    def blocked(self, waiting: bool) -> None:
        self._blocked_since = clock.monotonic() if waiting else None

    def updates_seen(self) -> int:
        return self._updates_seen

    def cut_round(self) -> int:
        return self._cut_round

    def on_cut(self, callback: Callable[[int, str], None] | None) -> None:
        with self._changed:
            self._cut_callback = callback
            round, why = self._cut_round, self._cut_why
            missed = callback is not None and round > 0 and round == self._newest_round()
        if missed and callback is not None:
            callback(round, why)

    def derive_key(self, purpose: str) -> bytes:
        return hmac.digest(self._key, f"derived for {purpose}".encode(), "sha256")

    def show(self, what: LiveProgress | EpochEnded | Notice) -> bool:
        try:
            self._channel.send(what)
        except (ChannelClosedError, ProtocolError):
            return False  # it is only displayed; the reader thread acts on a broken channel
        return True

    def report_epoch(self, epoch: int, row: bytes) -> None:
        self._send(EpochRow(epoch, False, row))

    def ask_after_epoch(self, epoch: int, row: bytes, timeout_s: float) -> str:
        with self._changed:
            self._decisions.clear()
            round = self._newest_round()
        self._send(EpochRow(epoch, True, row))
        deadline = clock.monotonic() + timeout_s
        with self._changed:
            while epoch not in self._decisions:
                if self._cut_round >= round:
                    raise HorovodInternalError(f"round {round} ended at the end of an epoch: {self._cut_why}")
                left = deadline - clock.monotonic()
                if left <= 0:
                    return ""
                self._changed.wait(left)
            return self._decisions[epoch]

    def kv_set(self, round: int, key: str, value: bytes) -> None:
        self._send(KvSet(round, key, value))

    def kv_get(self, round: int, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        with self._changed:
            self._next_request += 1
            request = self._next_request
        self._send(KvGet(round, request, tuple(keys)))
        reply: KvValues = self._await_in_round(round, self._replies, request, timeout_s, f"value for {list(keys)}")
        values, start = [], 0
        for size in reply.sizes:
            values.append(reply.payload[start : start + size])
            start += size
        return values

    def gather(self, round: int, name: str, rank: int, size: int, value: str, timeout_s: float) -> Sequence[str]:
        self._send(KvGather(round, name, rank, size, value))
        what = f"values of all {size} members of {name}"
        found: tuple[str, ...] = self._await_in_round(round, self._gathered, (round, name), timeout_s, what)
        return found

    def _await_in_round(self, round: int, replies: dict[Any, Any], key: Any, timeout_s: float, what: str) -> Any:
        """Wait for the driver's reply under that key, and remove it. Raises as `WorkerLink.kv_get` does."""
        deadline = clock.monotonic() + timeout_s
        with self._changed:
            while key not in replies:
                if self._cut_round >= round or self._newest_round() > round:
                    raise HorovodInternalError(f"round {round} ended while it was being set up: {self._cut_why}")
                left = deadline - clock.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no {what} within {timeout_s:.0f} s in round {round}")
                self._changed.wait(left)
            return replies.pop(key)

    # --- the end of the function ----------------------------------------------------------------------

    def raised(self, error: BaseException, traceback: str) -> None:
        """Report an exception of the user's function, with a shortened message and traceback if they are long."""
        try:
            text = str(error)
        except Exception as problem:
            text = f"(str() of the exception failed: {problem!r})"
        exit_code = error.exit_code if isinstance(error, ScriptExit) else None
        text, traceback = text[:MAX_ERROR_CHARACTERS], traceback[-MAX_ERROR_CHARACTERS:]
        self._send(Raised(type(error).__name__, text, traceback, exit_code))

    def abandoned(self, why: str) -> None:
        """Report that the function has to be run again from its start, in a new process."""
        self._send(Abandoned(why))

    def returned(self, over: bool) -> None:
        """Record whether the user's function has ended, which decides what a closed channel means.

        Args:
            over: True: the function has returned, and a closed channel is harmless. False: it is about to be called
                again, and a closed channel ends the process.
        """
        self._ending = over
        if not over:
            self._after_loop = False
            self._beat_now.set()

    def on_run_again(self, callback: Callable[[int], None]) -> None:
        """Call `callback(run)`, on the channel's thread, when the driver has the function called again."""
        self._run_again = callback

    # --- threads --------------------------------------------------------------------------------------

    def _newest_round(self) -> int:
        return self._assignment.world.round if self._assignment is not None else 0

    def _on_message(self, message: Message) -> None:
        match message:
            case WorkerWelcome(interval_s, silence_limit_s, stall_timeout_s):
                self._channel.set_silence_limit(silence_limit_s)
                self.stall_timeout_s = stall_timeout_s
                beats = threading.Thread(
                    target=self._send_heartbeats, args=(interval_s,), name="spark_elastic-beat", daemon=True
                )
                beats.start()
            case Cut(round, why):
                self._cut(round, why)
            case Goodbye(why):
                self._on_closed(why)
            case RunAgain(run):
                self._run_again(run)
            case _:
                with self._changed:
                    self._store(message)
                    self._changed.notify_all()

    def _store(self, message: Message) -> None:
        match message:
            case WorldAssigned(world, addresses):
                self._assignment = Assignment(world, self.worker, addresses, self._updates_seen)
                self._replies.clear()
                self._gathered.clear()
            case Provisional(rank, size, loop):
                self._provisional = ProvisionalPosition(rank, size, loop)
            case LoopResult(loop):
                self._loop_results[loop] = message
            case HostsUpdated(sequence):
                self._updates_seen = max(self._updates_seen, sequence)
            case EpochDecision(epoch, stop):
                self._decisions[epoch] = stop
            case KvValues(request):
                self._replies[request] = message
            case KvGathered(round, name, values):
                self._gathered[round, name] = values

    def _cut(self, round: int, why: str) -> None:
        with self._changed:
            self._cut_round, self._cut_why = max(self._cut_round, round), why
            callback = self._cut_callback
            self._changed.notify_all()
        if callback is not None:
            callback(round, why)

    def _send_heartbeats(self, interval_s: float) -> None:
        while True:
            try:
                since = self._blocked_since
                blocked_s = None if since is None else clock.monotonic() - since
                self._channel.send(WorkerHeartbeat(self._version, blocked_s, self._after_loop, self._begun))
            except ChannelClosedError:
                return  # the reader thread ends the process
            self._beat_now.wait(interval_s)
            self._beat_now.clear()

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ProtocolError as error:
            self._on_closed(str(error))

    def _on_closed(self, why: str) -> None:
        if not self._ending:
            exit_now(EXIT_CHANNEL_LOST, f"spark_elastic: worker {self.worker} ends: {why}")


def exit_now(code: int, why: str = "") -> NoReturn:
    """Flush the output and end the process, from any thread."""
    if why:
        print(why, file=sys.stderr)
    reaper.leave()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # the pipe is gone with its reader
    os._exit(code)

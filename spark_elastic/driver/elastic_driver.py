"""ElasticDriver: runs one job. One thread with an event loop, and one membership machine that decides.

Everything that happens (a connection, a closed socket, a launch that ended, a deadline) becomes an event for the
machine on this thread; each command of the machine becomes a message (`peers`), a launch or a line for people. The
driver itself decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from spark_elastic import clock
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.peers import JobObserver, Peers
from spark_elastic.driver.results import JobResults
from spark_elastic.errors import JobCancelledError, JobError, SessionLostError, SparkElasticError, UserFunctionError
from spark_elastic.membership import commands as do
from spark_elastic.membership import events as seen
from spark_elastic.membership.deadlines import MachineClock
from spark_elastic.membership.launcher import LaunchEnd, Launcher, OnEnded
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import Wait, reported
from spark_elastic.membership.registry import AT_INIT, DONE, READY, TRAINING
from spark_elastic.membership.states import Phase
from spark_elastic.membership.timeline import JobEnded, WaitChanged
from spark_elastic.membership.topology import SlotId
from spark_elastic.redaction import redacted
from spark_elastic.reporting.announcer import Announcer
from spark_elastic.reporting.job_status import Document, JobStatus, StatusModel, WorkerStatus
from spark_elastic.reporting.progress import ProgressModel
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.messages import LaunchSpec

logger = logging.getLogger(__name__)

RESULTS_TIMEOUT_S = 300.0  # seconds that the results of the finished workers may take to arrive through the launcher
FAREWELL_TIMEOUT_S = 2.0  # seconds that agents have to end by themselves before their launches are ended
CLOSE_TIMEOUT_S = 3.0
MAX_CLOCK_INTERVAL_S = 2.0  # seconds between two readings of the clocks, which find the driver's own pauses
_LOOK_S = 0.005


class EventSource(Protocol):
    """A source of events for the membership machine: `hosts.HostManager`, `spark.executors.ExecutorWatch`."""

    def start(self, post: Callable[[seen.Event], None]) -> None:
        """Call `post`, from any thread, with each event from now on."""

    def close(self) -> None: ...


class ElasticDriver:
    """Runs a job on the calling thread until it finishes, fails or is cancelled.

    `make_launcher` makes the launcher from the `on_ended` that it has to call; `listening` is the bound socket for
    agents and workers. `resumable` returns what a later job can resume, to append to the error that ends this one.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        settings: ElasticSettings,
        make_launcher: Callable[[OnEnded], Launcher],
        listening: socket.socket,
        *,
        sources: Sequence[EventSource] = (),
        printer: OutputPrinter,
        verbose: int = 1,
        progress: ProgressModel | None = None,
        status: StatusModel | None = None,
        observer: JobObserver | None = None,
        resumable: Callable[[], str] | None = None,
    ) -> None:
        self._settings = settings
        self._launcher = make_launcher(self._on_launch_ended)
        self._listening = listening
        self._sources = sources
        self._resumable = resumable
        self._machine = Membership(settings)

        on_change = None if observer is None else observer.membership_changed
        self.announcer = Announcer(spec.job, printer.say, verbose, progress, status, on_change)
        self._peers = Peers(spec, settings, self._launcher, self.announcer, printer, self._handle, self._fail, observer)
        self._launched: set[SlotId] = set()  # slots whose launch has not ended
        self._results = JobResults()
        self._read_clock_every_s = min(settings.heartbeat_interval_s, MAX_CLOCK_INTERVAL_S)
        self._machine_clock = MachineClock(self._read_clock_every_s)
        self._alarm: asyncio.TimerHandle | None = None  # the next call of `_wake`
        self._ending = False
        self._failure: SparkElasticError | None = None
        self._has_failed = False  # true once the failure is announced. The machine may not know of it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended, self._slots_over = asyncio.Event(), asyncio.Event()
        self._cancelled: str | None = None  # the reason of a cancellation before `run`
        self._cancel_lock = threading.Lock()
        self.stop_requested = threading.Event()  # set by `cancel`, for waits before `run`

    # --- from any thread ----------------------------------------------------------------------------

    def post(self, event: seen.Event) -> None:
        """Hand an event to the machine. No effect before `run` and after its end."""
        self._call(self._handle, event)

    def cancel(self, why: str) -> None:
        """End the job; `run` raises JobCancelledError."""
        with self._cancel_lock:
            if self._loop is None:
                self._cancelled = why
        self.stop_requested.set()
        self.post(seen.CancelRequested(why))
        self._call(self._stop_collecting, why)

    def note_waiting(self, wait: Wait, until: float | None = None) -> None:
        """Show a wait before `run`, with its deadline on this process's monotonic clock."""
        self.announcer.announce(WaitChanged(clock.monotonic(), wait, until))
        self._announce()

    def never_ran(self, error: BaseException) -> BaseException:
        """Record that the job ended before `run` was called. Returns the error to raise."""
        if self._cancelled is not None and isinstance(error, JobCancelledError):
            error = JobCancelledError(self._cancelled)
        self._announce_failure(error)
        return error

    @property
    def tasks_pending(self) -> int:
        """The number of launched slots whose agents have not connected yet."""
        return max(0, len(self._launched) - len(self._peers.agents))

    def status(self) -> JobStatus:
        registry, world = self._machine.registry, self._machine.world
        return JobStatus(
            phase=(Phase.FAILED if self._has_failed else self._machine.phase).value,
            round=registry.round,
            size=0 if world is None else world.size,
            progress=self._machine.progress,
            waiting_for=self.announcer.waiting,
            ready=registry.count(AT_INIT, READY, TRAINING),
            succeeded=registry.count(DONE),
            failed=registry.failed,
            resets=max(0, registry.round - 1),
        )

    def workers(self) -> list[WorkerStatus]:
        """Return the workers that are not gone."""
        registry = self._machine.registry
        return [
            WorkerStatus(
                worker.id,
                worker.place.host,
                worker.place.executor,
                worker.rank if 0 < worker.round == registry.round else None,
                worker.state.value,
                worker.blocked_s,
            )
            for worker in list(registry.workers.values())  # a copy: the job's thread changes the dict meanwhile
        ]

    def document(self, model: StatusModel) -> Document:
        """Return what the status page shows at this moment."""
        return model.document(self.status(), self.workers(), self.announcer.changes, clock.monotonic(), clock.wall())

    def _call(self, function: Callable[..., None], *args: object) -> None:
        """Call `function` on the job's thread. No effect before `run` and after its end."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
                loop.call_soon_threadsafe(function, *args)

    # --- the job's thread ---------------------------------------------------------------------------

    def run(self) -> list[bytes]:
        """Run the job; return the pickled results of the last world by rank. Raises JobError, UnknownInterfaceError."""
        return asyncio.run(self._main())

    def close(self) -> None:
        """Close the socket and the launcher of a driver whose `run` was never called. `run` closes them itself."""
        self._listening.close()
        self._launcher.close(CLOSE_TIMEOUT_S)

    async def _main(self) -> list[bytes]:
        with self._cancel_lock:
            self._loop = asyncio.get_running_loop()
            cancelled = self._cancelled
        try:
            await self._peers.server.start(self._listening)
            for source in self._sources:
                source.start(self.post)
            self._wake()
            self._handle(seen.JobStarted())
            if cancelled is not None:
                self._handle(seen.CancelRequested(cancelled))
            await self._ended.wait()
            return await self._outcome()
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            self.announcer.print_changes(clock.monotonic(), last=True)
            closings = [source.close for source in self._sources]
            await close_side_by_side([*closings, lambda: self._launcher.close(CLOSE_TIMEOUT_S)])
            await self._peers.server.close()

    def _stop_collecting(self, why: str) -> None:
        """End a job that is cancelled while results arrive, when the membership machine has finished already."""
        if self._results.expected is not None and self._failure is None and not self._slots_over.is_set():
            self._failure = JobCancelledError(why)
            self._announce_failure(self._failure)
            self._slots_over.set()

    async def _outcome(self) -> list[bytes]:
        timeout = FAREWELL_TIMEOUT_S if self._results.expected is None else RESULTS_TIMEOUT_S
        if self._launched:
            try:
                await asyncio.wait_for(self._slots_over.wait(), timeout)
            except asyncio.TimeoutError:
                logger.warning("slots %s did not end within %.0f s", sorted(self._launched), timeout)
        if self._failure is not None:
            raise self._failure
        return self._results.in_rank_order()

    def _handle(self, event: seen.Event) -> None:
        if self._has_failed:
            return
        now = self._now()
        try:
            commands = self._machine.handle(event, now)
            self.announcer.observe(event, commands, clock.monotonic())
            for command in commands:
                self._carry_out(command)
        except Exception as error:  # a bug in here must end the job, not let it wait for ever
            logger.exception("the driver failed on %r", event)
            self._fail(JobError(f"internal error in the driver on {event!r}: {error!r}"))
        if not isinstance(event, (seen.WorkerAlive, seen.AgentAlive)) or self.announcer.pending:
            self._announce()
        self._wake_at(self._deadline())

    def _now(self) -> float:
        """Return the machine's time. Tells the machine first if this process was suspended since the last call."""
        now, paused_s = self._machine_clock.read(clock.monotonic(), clock.wall())
        if paused_s:
            self._handle(seen.DriverPaused(paused_s))
        return now

    def _deadline(self) -> float | None:
        """Return the time of the monotonic clock at which the machine needs a `Tick`; None: it needs none."""
        deadline = None if self._ending else self._machine.next_deadline()
        return None if deadline is None else deadline + self._machine_clock.paused_s

    def _wake(self) -> None:
        """Look at the clocks, at the machine's next deadline and at the lines that are due."""
        self._alarm = None
        self._wake_at(clock.monotonic() + self._read_clock_every_s)
        now, deadline = self._now(), self._deadline()
        if deadline is not None and deadline <= now + self._machine_clock.paused_s:
            self._handle(seen.Tick())
        else:  # it has moved since, or the driver was paused
            self._wake_at(deadline)
        self._announce()

    def _wake_at(self, due: float | None) -> None:
        """Have `_wake` called at this time or earlier; later, a flow of heartbeats would put it off for ever."""
        if self._loop is None or due is None or (self._alarm is not None and self._alarm.when() <= due):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(due, self._wake)

    def _on_launch_ended(self, end: LaunchEnd) -> None:
        """Called from the launcher's threads."""
        gone = None if end.outcome is not None or self._ending else self._launcher.gone()
        self._call(self._launch_ended, end, gone)

    def _launch_ended(self, end: LaunchEnd, gone: str | None) -> None:
        self._launched.discard(end.slot)
        self._results.slot_ended(end)
        if gone is not None:
            self._fail(SessionLostError(reason=gone, progress=self._machine.progress))
        self._handle(seen.SlotEnded(end.slot, end.cause, end.submitted))
        if self._ending and not self._launched:  # before the end, slots that are over are launched again
            self._slots_over.set()

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.LaunchSlot(slot):
                self._launched.add(slot)
                self._launcher.launch(slot)
            case do.WithdrawSlot(slot, cause):
                self._launcher.withdraw(slot, cause)
            case do.FinishJob(workers):
                self._results.expect(workers, self._peers.slots_of(workers))
                self._end(keep_results=True, why="the job is done")
            case do.FailJob(UserFunctionError() | JobCancelledError() as error):
                self._fail(error)
            case do.FailJob(error):  # if Spark itself is gone, that is why all workers are lost
                gone = self._launcher.gone()
                progress = self._machine.progress
                self._fail(error if gone is None else SessionLostError(reason=gone, progress=progress))
            case do.Announce(JobEnded()) if self._has_failed:
                pass  # announced already, with its cause
            case do.Announce(record):
                self.announcer.announce(record.shifted(self._machine_clock.paused_s))
            case _:
                self._peers.send(command)

    def _fail(self, error: SparkElasticError) -> None:
        if self._failure is None and not self._ended.is_set():
            self._failure = error
            cancelled = isinstance(error, JobCancelledError)
            if self._resumable is not None and not isinstance(error, (UserFunctionError, JobCancelledError)):
                error.message += self._resumable()
            self._end(keep_results=False, why="the job was cancelled" if cancelled else "the job failed")
            self._announce_failure(error)

    def _end(self, *, keep_results: bool, why: str) -> None:
        self._ending = True
        self._peers.finish(keep_results=keep_results, why=why)
        for slot in self._launched - self._peers.slots():
            self._launcher.withdraw(slot, reported(why))
        self._ended.set()

    def _announce_failure(self, error: BaseException) -> None:
        self._has_failed = True
        self.announcer.announce(JobEnded(clock.monotonic(), "failed", redacted(error) or type(error).__name__))

    def _announce(self) -> None:
        """Print the lines that are due, and have those that are not printed later."""
        self._wake_at(self.announcer.print_changes(clock.monotonic()))


async def close_side_by_side(closings: Sequence[Callable[[], None]]) -> None:
    """Call all functions, each in its own thread, and wait until all have returned. Errors are logged.

    Without an executor: at the interpreter's exit executors start no threads any more.
    """

    def close(closing: Callable[[], None]) -> None:
        try:
            closing()
        except Exception:
            logger.exception("could not close %r", closing)

    threads = [
        threading.Thread(target=close, args=(each,), name="spark_elastic-close", daemon=True) for each in closings
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        await asyncio.sleep(_LOOK_S)

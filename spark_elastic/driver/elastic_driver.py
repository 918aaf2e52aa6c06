"""ElasticDriver: runs one job. One thread, one event loop as its inbox, one membership machine that decides.

Everything that happens (a connection, a closed socket, a launch that ended, a deadline) becomes an event for the
machine on this thread; every command of the machine becomes a message, a launch or a log line. No decision is taken
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from spark_elastic import clock
from spark_elastic.driver.addresses import AddressBook
from spark_elastic.driver.launcher import Launcher, LoopResults, OnEnded, Results
from spark_elastic.driver.output import OutputPrinter
from spark_elastic.driver.registry import WorkerStateRegistry
from spark_elastic.driver.rendezvous_server import RendezvousServer
from spark_elastic.errors import (
    JobCancelledError,
    JobError,
    SessionLostError,
    SparkElasticError,
    UnknownInterfaceError,
    UserFunctionError,
)
from spark_elastic.membership import commands as do
from spark_elastic.membership import events as seen
from spark_elastic.membership.deadlines import MachineClock
from spark_elastic.membership.machine import Membership
from spark_elastic.membership.reasons import LossCause, LossKind, Wait, reported
from spark_elastic.membership.states import AgentOutcome, Phase
from spark_elastic.membership.timeline import JobEnded, Record, Waiting
from spark_elastic.membership.topology import AgentId, SlotId, WorkerId, World
from spark_elastic.membership.wording import change_in_words, loss_in_words
from spark_elastic.reporting.announcer import Announcer
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.progress import ProgressModel
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire import messages as wire
from spark_elastic.wire.launch_spec import AgentOrder

# Closing several things at once, without executors: at the interpreter's exit those start no threads any more.

logger = logging.getLogger(__name__)


async def close_side_by_side(closings: Sequence[Callable[[], None]]) -> None:
    """Call all of them, each on a thread of its own; returns when all have returned. What one raises is logged."""
    loop = asyncio.get_running_loop()
    left = [loop.create_future() for _ in closings]

    def close(number: int) -> None:
        try:
            closings[number]()
        except Exception:
            logger.exception("could not close %r", closings[number])
        finally:
            loop.call_soon_threadsafe(left[number].set_result, None)

    threads = [
        threading.Thread(target=close, args=(number,), name="spark_elastic-close", daemon=True)
        for number in range(len(closings))
    ]
    for thread in threads:
        thread.start()
    await asyncio.gather(*left)
    for thread in threads:
        thread.join()  # it has said all it had to say


RESULTS_TIMEOUT_S = 300.0
"""How long the finished workers' results may take to arrive through the launcher."""
FAREWELL_TIMEOUT_S = 2.0
"""How long agents get to end by themselves before their launches are ended for them."""
CLOSE_TIMEOUT_S = 3.0
LAST_WORDS_S = 5.0
"""How long what a worker had sent is still listened to after its process is gone."""


class EventSource(Protocol):
    """A discovery that feeds the machine: listeners, pollers."""

    def start(self, post: PostEvent) -> None: ...

    def close(self) -> None: ...


class PostEvent(Protocol):
    def __call__(self, event: seen.Event) -> None: ...


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """What a job is doing."""

    phase: str
    round: int
    """The current world's number; 0: none yet."""
    size: int
    """The current world's size; 0: none."""
    progress: int | None
    """The most optimizer steps known to be applied."""
    waiting_for: str
    """In words, empty when it waits for nothing."""


class ElasticDriver:
    """Runs a job on the calling thread until it finishes, fails or is cancelled."""

    def __init__(
        self,
        order: AgentOrder,
        settings: ElasticSettings,
        make_launcher: Callable[[OnEnded], Launcher],
        listening: socket.socket,
        *,
        sources: Sequence[EventSource] = (),
        printer: OutputPrinter,
        verbose: int = 1,
        progress: ProgressModel | None = None,
    ) -> None:
        self._order = order
        self._settings = settings
        self._launcher = make_launcher(self._slot_ended_anywhere)
        self._listening = listening
        self._sources = sources
        self._printer = printer
        self._machine = Membership(settings)
        self.registry = WorkerStateRegistry(settings.reset_limit)
        self._server = RendezvousServer(
            order.key,
            self,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            silence_limit_s=settings.driver_silence_s,
            stall_timeout_s=settings.stall_timeout_s,
        )
        self._addresses = AddressBook(order.nics)
        self._agent_of: dict[WorkerId, AgentId] = {}
        self._agents: set[AgentId] = set()
        self._launched: set[SlotId] = set()
        self._slot_of: dict[AgentId, SlotId] = {}
        self._without_interface: set[SlotId] = set()
        """Slots whose last agent had no interface that may be used."""
        self._results = Results()
        self._loop_results = LoopResults()
        self._world: World | None = None
        self._announcer = Announcer(order.job, printer.say, verbose, progress)
        self._machine_clock = MachineClock(settings.heartbeat_interval_s)
        self._looking: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None
        self._ending = False
        self._failure: SparkElasticError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event
        self._slots_over: asyncio.Event
        self._cancelled: str | None = None
        self._has_failed = False
        self._cancel_lock = threading.Lock()
        self.stop_requested = threading.Event()
        """Set by `cancel`, for what is waited for before `run`."""

    # --- from any thread ----------------------------------------------------------------------------

    def post(self, event: seen.Event) -> None:
        """Hand an event to the machine; harmless before the start and after the end."""
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._handle, event)
            except RuntimeError:
                pass  # the loop has closed: the job is over

    def cancel(self, why: str) -> None:
        """End the job; `run` raises JobCancelledError."""
        with self._cancel_lock:
            if self._loop is None:
                self._cancelled = why
        self.stop_requested.set()
        self.post(seen.CancelRequested(why))
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the job is over
                loop.call_soon_threadsafe(self._collect_no_more, why)

    def note_waiting(self, wait: Wait, until: float | None = None) -> None:
        """Show what is waited for before `run`. until: on this process's monotonic clock."""
        self._announcer.announce(Waiting(clock.monotonic(), wait, until))
        self._tell()

    def never_ran(self, error: BaseException) -> BaseException:
        """Note that the job ended before `run` was called. Returns: what to raise; a cancellation has its own words."""
        with self._cancel_lock:
            cancelled = self._cancelled
        if cancelled is not None and isinstance(error, JobCancelledError):
            error = JobCancelledError(cancelled)
        self._announce_failure(error)
        return error

    def events(self) -> list[Record]:
        """The membership timeline so far; `at` and other times are seconds since the epoch."""
        return self._announcer.timeline

    def changes(self) -> list[MembershipChange]:
        """What became of the world so far; `at` in seconds since the epoch."""
        return self._announcer.changes

    @property
    def tasks_pending(self) -> int:
        """Slots that were asked for and whose agents are not there yet."""
        return max(0, len(self._launched) - len(self._agents))

    def status(self) -> JobStatus:
        known = self._machine.status()
        return JobStatus(
            phase=(Phase.FAILED if self._has_failed else known.phase).value,
            round=known.round,
            size=known.size,
            progress=known.progress,
            waiting_for=self._announcer.waiting,
        )

    # --- the job's thread ---------------------------------------------------------------------------

    def run(self) -> list[bytes]:
        """Run the job.

        Returns: what each worker of the last world returned, pickled, in rank order.
        Raises:
            JobError: why it could not go on.
            UnknownInterfaceError: a host has none of the interfaces asked for.
        """
        return asyncio.run(self._main())

    def close(self) -> None:
        """Give back what is held if `run` was never called; harmless afterwards."""
        self._listening.close()
        self._launcher.close(CLOSE_TIMEOUT_S)

    async def _main(self) -> list[bytes]:
        self._ended = asyncio.Event()
        self._slots_over = asyncio.Event()
        with self._cancel_lock:
            self._loop = asyncio.get_running_loop()
            cancelled = self._cancelled
        try:
            await self._server.start(self._listening)
            for source in self._sources:
                source.start(self.post)
            self._keep_looking()
            self._handle(seen.JobStarted())
            if cancelled is not None:
                self._handle(seen.CancelRequested(cancelled))
            await self._ended.wait()
            return await self._outcome()
        finally:
            for timer in (self._timer, self._telling, self._looking):
                if timer is not None:
                    timer.cancel()
            self._announcer.print_changes(clock.monotonic(), last=True)
            await self._close_all()
            await self._server.close()

    def _collect_no_more(self, why: str) -> None:
        """Cancelled while finished workers' results were on their way: the machine has nothing to cancel any more."""
        if self._results.expected is not None and self._failure is None and not self._slots_over.is_set():
            self._failure = JobCancelledError(why)
            self._announce_failure(self._failure)
            self._slots_over.set()

    async def _close_all(self) -> None:
        closings = [source.close for source in self._sources]
        await close_side_by_side([*closings, lambda: self._launcher.close(CLOSE_TIMEOUT_S)])

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

    # --- events in ----------------------------------------------------------------------------------

    def _handle(self, event: seen.Event) -> None:
        if self._has_failed:
            return  # for a reason that the machine may know nothing of
        now = self._now()
        try:
            commands = self._machine.handle(event, now)
            self.registry.observe(event, commands)
            self._announcer.observe(event, commands, clock.monotonic())
            for command in commands:
                self._carry_out(command)
        except Exception as error:  # a bug in here must end the job, not leave it waiting
            logger.exception("the driver failed on %r", event)
            self._fail(JobError(f"internal error in the driver on {event!r}: {error!r}"))
        if self._telling is not None or not isinstance(event, (seen.WorkerAlive, seen.AgentAlive)):
            self._tell()
        self._set_timer(now)

    def _now(self) -> float:
        """The machine's time. It is told first if the driver has stood still since anybody last looked."""
        now, paused_s = self._machine_clock.read(clock.monotonic(), clock.wall())
        if paused_s:
            self._handle(seen.DriverPaused(paused_s))
        return now

    def _keep_looking(self) -> None:
        assert self._loop is not None
        self._now()
        self._looking = self._loop.call_later(self._settings.heartbeat_interval_s, self._keep_looking)

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.next_deadline()
        if deadline is not None and not self._ending:
            assert self._loop is not None
            self._timer = self._loop.call_later(max(deadline - now, 0.0), self._handle, seen.Tick())

    def agent_joined(self, agent: AgentId, hello: wire.AgentHello, address: str) -> None:
        self._slot_of[agent] = hello.place.slot
        if not self._ending and not self._launcher.admit(hello.place.slot, hello.launch):
            self._server.to_agent(agent, wire.FinishAgent(False, "its launch is over"))
            return  # what it says until it has gone is about nothing that the machine knows
        self._agents.add(agent)
        self._tell_launcher()
        if self._ending:
            self._server.to_agent(agent, wire.FinishAgent(False, "the job is over"))
            return
        try:
            self._addresses.joined(agent, hello, address)
        except UnknownInterfaceError as error:
            self._unusable(agent, hello.place.slot, error)
            return
        self._without_interface.discard(hello.place.slot)
        for prober, targets in self._addresses.probes_for(agent):
            self._server.to_agent(prober, wire.ProbePeers(targets))
        self._handle(seen.AgentJoined(agent, hello.place))

    def _unusable(self, agent: AgentId, slot: SlotId, error: UnknownInterfaceError) -> None:
        """Send home an agent that no other could reach. Its slot cools down, and keeps the reason."""
        self._without_interface.add(slot)
        logger.warning("an agent is sent away: %s", error)
        usable = self._settings.max_num_proc - len(self._without_interface)
        if self._world is None and usable < self._settings.min_num_proc:
            self._fail(error)
            return
        self._agents.discard(agent)
        self._tell_launcher()
        self._server.to_agent(agent, wire.FinishAgent(False, str(error)))

    def _tell_launcher(self) -> None:
        if not self._ending:  # agents of a job that ends are not missed
            self._launcher.agents_joined(frozenset(self._slot_of[agent] for agent in self._agents))

    def agent_said(self, agent: AgentId, message: wire.Message) -> None:
        match message:
            case wire.AgentHeartbeat(running):
                self._server.to_agent(agent, wire.Pong())
                self._handle(seen.AgentAlive(agent, running))
            case wire.WorkerExited(worker, exit_code, stderr_tail, oom_kills, memory):
                if self._agent_of.get(worker) == agent:
                    # its own channel closes by itself; what it said at the end may still be on the way
                    asyncio.get_running_loop().call_later(LAST_WORDS_S, self._forget_worker, worker)
                    cause = LossCause(LossKind.EXITED, code=exit_code)
                    self._handle(seen.WorkerLost(worker, cause, stderr_tail, oom_kills, memory))
            case wire.OutputLines(worker, stream, lines):
                self._printer.worker_lines(self._name_of(worker, agent), stream, lines)
            case wire.ResultStored(worker, _, in_loop, run):
                self._handle(seen.WorkerDone(worker, in_loop, run))
            case wire.PeersReachable(reachable):
                self._addresses.answered(agent, reachable)
            case _:
                self._server.drop_agent(agent, f"an agent does not send {type(message).__name__}")

    def agent_gone(self, agent: AgentId, why: str) -> None:
        self._agents.discard(agent)
        self._handle(seen.AgentLost(agent, LossCause(LossKind.CONNECTION_CLOSED, detail=why)))
        del self._slot_of[agent]
        self._tell_launcher()
        for worker in [w for w, a in self._agent_of.items() if a == agent]:
            del self._agent_of[worker]
            self._server.drop_worker(worker, "its agent is gone")
        self._addresses.gone(agent)

    def _forget_worker(self, worker: WorkerId) -> None:
        self._agent_of.pop(worker, None)
        self._server.drop_worker(worker, "its process is gone")

    def worker_expected(self, worker: WorkerId) -> bool:
        return worker in self._agent_of

    def worker_said(self, worker: WorkerId, message: wire.Message) -> None:
        match message:
            case wire.WorkerHello():
                self._handle(seen.WorkerAlive(worker))
            case wire.WorkerHeartbeat(version, blocked_s, after_loop, begun):
                self._server.to_worker(worker, wire.Pong())
                self._handle(seen.WorkerAlive(worker, version, blocked_s, after_loop, begun))
            case wire.Ready(round, version, at_init, loop):
                self._handle(seen.WorkerReady(worker, round, version, at_init, loop))
            case wire.LoopResult():
                for behind in self._loop_results.offered(message):
                    self._server.to_worker(behind, message)
            case wire.Raised(error_type, error, traceback, exit_code):
                self._handle(seen.WorkerRaised(worker, error_type, error, traceback, exit_code))
            case wire.LiveProgress():
                if self._rank_0() == worker:
                    self._announcer.live(message, clock.monotonic())
            case wire.EpochEnded():
                self._announcer.epoch(message, clock.monotonic())
            case wire.Notice(text):
                self._announcer.notice(worker, text, clock.monotonic())
            case wire.Abandoned(why):
                self._handle(seen.WorkerAbandoned(worker, why))
            case _:
                self._server.drop_worker(worker, f"a worker does not send {type(message).__name__}")
                self._handle(seen.WorkerLost(worker, LossCause(LossKind.PROTOCOL_BROKEN)))

    def worker_gone(self, worker: WorkerId, why: str) -> None:
        self._handle(seen.WorkerLost(worker, LossCause(LossKind.CONNECTION_CLOSED, detail=why)))

    def _slot_ended_anywhere(self, slot: SlotId, cause: LossCause, outcome: AgentOutcome | None) -> None:
        assert self._loop is not None
        gone = None if outcome is not None or self._ending else self._launcher.gone()
        submitted = outcome is not None or not self._launcher.could_not_submit(slot)
        try:
            self._loop.call_soon_threadsafe(self._slot_ended, slot, cause, outcome, submitted, gone)
        except RuntimeError:
            pass  # the loop has closed: the job is over

    def _slot_ended(
        self, slot: SlotId, cause: LossCause, outcome: AgentOutcome | None, submitted: bool, gone: str | None
    ) -> None:
        self._launched.discard(slot)
        self._results.slot_ended(slot, cause, outcome)
        if gone is not None:
            self._fail(self._session_lost(gone))
        self._handle(seen.SlotEnded(slot, cause, submitted))
        if not self._launched:
            self._slots_over.set()

    # --- commands out -------------------------------------------------------------------------------

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.LaunchSlot(slot):
                self._launched.add(slot)
                self._launcher.launch(slot)
            case do.WithdrawSlot(slot, cause):
                self._launcher.withdraw(slot, cause)
            case do.StartWorker(agent, worker):
                self._agent_of[worker] = agent
                self._server.to_agent(agent, wire.StartWorkerProcess(worker))
            case do.StopWorker(agent, worker, cause):
                why = loss_in_words(cause)
                self._server.to_agent(agent, wire.StopWorkerProcess(worker, why))
                self._server.drop_worker(worker, why)
            case do.AdmitProvisionally(worker, rank, size, loop):
                for result in self._loop_results.for_newcomer(worker, loop):
                    self._server.to_worker(worker, result)
                self._server.to_worker(worker, wire.Provisional(rank, size, loop))
            case do.PublishWorld(world):
                self._publish(world)
            case do.NotifyHostsUpdated(workers, sequence):
                for worker in workers:
                    self._server.to_worker(worker, wire.HostsUpdated(sequence))
            case do.CutPeers(workers, round, change):
                for worker in workers:
                    self._server.to_worker(worker, wire.Cut(round, change_in_words(change)))
            case do.RerunFunction(worker, run, change):
                self._server.to_worker(worker, wire.RunAgain(run, change_in_words(change)))
            case do.DismissAgent(agent, cause):
                self._server.to_agent(agent, wire.FinishAgent(False, loss_in_words(cause)))
            case do.FinishJob(workers):
                slots = {self._slot_of[self._agent_of[w]]: w for w in workers if w in self._agent_of}
                self._results.expect(workers, slots)
                self._end(keep_results=True, why="the job is done")
            case do.FailJob(error):
                self._fail(self._behind(error))
            case do.Announce(JobEnded()) if self._has_failed:
                pass  # announced with what is behind it
            case do.Announce(record):
                self._announcer.announce(_later(record, self._machine_clock.paused_s))

    def _publish(self, world: World) -> None:
        self._world = world
        self._loop_results.joined(world.workers)
        agents = {member.worker: self._agent_of[member.worker] for member in world.members}
        chosen = self._addresses.choose(tuple(agents.values()))
        self._server.publish(world, {worker: chosen[agent] for worker, agent in agents.items()})

    def _fail(self, error: SparkElasticError) -> None:
        if self._failure is None and not self._ended.is_set():
            self._failure = error
            self._end(keep_results=False, why="the job was cancelled" if _is_cancel(error) else "the job failed")
            self._announce_failure(error)

    def _behind(self, error: JobError) -> JobError:
        """If Spark itself is gone, all workers are lost at once; that is what to say then."""
        if isinstance(error, (UserFunctionError, JobCancelledError)):
            return error
        gone = self._launcher.gone()
        return error if gone is None else self._session_lost(gone)

    def _session_lost(self, why: str) -> SessionLostError:
        return SessionLostError(reason=why, progress=self._machine.status().progress)

    def _end(self, *, keep_results: bool, why: str) -> None:
        self._ending = True
        for agent in self._agents:
            self._server.to_agent(agent, wire.FinishAgent(keep_results, why))
        with_agent = {self._slot_of[agent] for agent in self._agents}
        for slot in self._launched - with_agent:
            self._launcher.withdraw(slot, reported(why))
        self._ended.set()

    # --- for people ---------------------------------------------------------------------------------

    def _announce_failure(self, error: BaseException) -> None:
        self._has_failed = True
        self._announcer.announce(JobEnded(clock.monotonic(), "failed", str(error) or type(error).__name__))

    def _tell(self) -> None:
        """Lines for people, now or as soon as enough is known."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        now = clock.monotonic()
        due = self._announcer.print_changes(now)
        if due is not None and self._loop is not None:
            self._telling = self._loop.call_later(due - now, self._tell)

    def _rank_0(self) -> WorkerId | None:
        return None if self._world is None else self._world.members[0].worker

    def _name_of(self, worker: WorkerId, agent: AgentId) -> str:
        if self._world is not None and worker in self._world.workers:
            return str(self._world.member(worker).rank)
        return f"slot {self._slot_of[agent]}"


def _later(record: Record, seconds: float) -> Record:
    """A record of the machine in the time of this process's clock."""
    if not seconds:
        return record
    times = {name: getattr(record, name, None) for name in ("at", "deadline", "until")}
    return dataclasses.replace(record, **{name: at + seconds for name, at in times.items() if at is not None})


def _is_cancel(error: SparkElasticError) -> bool:
    return isinstance(error, JobCancelledError)

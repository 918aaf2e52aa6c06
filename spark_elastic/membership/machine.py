"""The membership machine: events in, commands out. It decides which worker trains in which world, from which state.

It uses no thread, socket, clock or log. `docs/protocol.md` describes the protocol as a whole.

Calls go down through three classes and never up: `Membership` handles events, `WorldLifecycle` decides which
workers train together, `SlotScheduler` decides where processes run. They share one `MachineContext`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from spark_elastic.errors import JobCancelledError, LaunchError, UserFunctionError, WorkerStartError
from spark_elastic.membership import events as seen
from spark_elastic.membership.commands import Command, DismissAgent
from spark_elastic.membership.deadlines import Timer, paused_within
from spark_elastic.membership.failures import EXIT_RAISED, REPORT_GRACE_S
from spark_elastic.membership.reasons import LossCause, LossKind, loss_in_words
from spark_elastic.membership.registry import ADMITTED, AT_INIT, BOOTING, DONE, READY, TRAINING, Agent, Worker
from spark_elastic.membership.slots import MachineContext, SlotScheduler
from spark_elastic.membership.states import ENDED, Phase
from spark_elastic.membership.timeline import DriverStoodStill
from spark_elastic.membership.topology import AgentId, WorkerId, World
from spark_elastic.membership.worlds import WorldLifecycle
from spark_elastic.settings import ElasticSettings

_EXITS_REMEMBERED = 100
_LONGEST_RETRANSMISSION_S = 120.0
"""Data sent to a suspended machine is sent again after growing pauses, of this at most (Linux, TCP_RTO_MAX)."""


class Membership:
    """The membership of one job. All calls come from one thread."""

    def __init__(self, settings: ElasticSettings) -> None:
        self.settings = settings
        self._now = float("-inf")
        timers: list[Timer[Any]] = []
        self._timers = timers
        self._agent_silence = Timer(timers, self._on_agent_silent, settings.heartbeat_timeout_s)
        self._silence = Timer(timers, self._on_worker_silent, settings.heartbeat_timeout_s)
        boot_timer = Timer(timers, self._on_boot_due, settings.start_timeout_s)
        self._exit_timer = Timer(timers, self._on_exit_due, REPORT_GRACE_S)
        self._context = MachineContext(settings, timers, self._silence, boot_timer, self._exit_timer)
        self.registry = self._context.registry  # the record of the job's workers and worlds. For reading only
        self._verdict_timer = Timer[int](timers, lambda _, now: self._judge_boot_failures(now, True), REPORT_GRACE_S)
        self._crash_timer = Timer[int](timers, lambda _, now: self._judge_crashes(now))
        self._exclusion_timer = Timer(timers, self._on_exclusion_due)
        self._growth_timer = Timer[int](timers, lambda _, now: self._worlds.consider_interrupt(now))
        # silence of another member is noticed before it, also if the driver was late
        held_s = settings.heartbeat_timeout_s + 2 * settings.heartbeat_interval_s
        self._held_timer = Timer[int](timers, lambda _, now: self._judge_raised(now, True), held_s)
        #: With restart="world": the first exception of the world's members, until it is known if a loss is the reason.
        self._held: tuple[UserFunctionError, int, float] | None = None  # with its round and time
        self._crashes = self._context.crashes
        #: Processes that exited before any worker was ever ready. Later ones are failures of their slots alone.
        self._boot_failures: list[seen.WorkerLost] = []
        self._any_ready = False
        self._scheduler = scheduler = SlotScheduler(self._context)
        self._worlds = WorldLifecycle(self._context, scheduler)
        self._pauses: deque[tuple[float, float]] = deque(maxlen=100)  # of the driver: when each ended, and its length
        #: Rank and host of the newest workers whose process exited.
        self._exited: dict[WorkerId, tuple[int | None, str]] = {}
        self._answers: dict[type[seen.Event], Callable[[Any, float], None]] = {
            seen.WorkerAlive: self._on_worker_alive,
            seen.AgentAlive: self._on_agent_alive,
            seen.DriverPaused: self._on_driver_paused,
            seen.WorkerReady: self._on_worker_ready,
            seen.WorkerLost: self._on_worker_lost,
            seen.WorkerDone: self._on_worker_done,
            seen.AddressLost: self._on_address_lost,
            seen.WorkerAbandoned: self._on_worker_abandoned,
            seen.WorkerRaised: self._on_worker_raised,
            seen.AgentJoined: self._on_agent_joined,
            seen.AgentLost: self._on_agent_lost,
            seen.SlotEnded: self._on_slot_ended,
            seen.ExecutorDecommissioned: lambda event, now: self._vacate(scheduler.decommission(event.executor), now),
            seen.ExecutorLost: self._on_executor_lost,
            seen.HostsObserved: self._on_hosts_observed,
            seen.CancelRequested: lambda event, now: self._worlds.fail(JobCancelledError(event.why), now),
            seen.Tick: self._on_tick,
        }

    @property
    def phase(self) -> Phase:
        return self._worlds.phase

    @property
    def world(self) -> World | None:
        """The newest world, also while it is being replaced; None before the first."""
        return self._worlds.world

    @property
    def progress(self) -> int:
        """The most optimizer steps that any worker has reported."""
        return self._worlds.furthest.steps

    def next_deadline(self) -> float | None:
        """Return when to send a Tick if nothing else happens; None: never (before the start, after the end)."""
        if self.phase is Phase.CREATED or self.phase in ENDED:
            return None
        due = min(timer.next() for timer in self._timers)
        return None if due == float("inf") else due

    def handle(self, event: seen.Event, now: float) -> list[Command]:
        """Return the commands that answer the event, in order. `now`: seconds on a clock that does not go back.

        Deadlines are checked on a `Tick` only, so that events that already wait in the driver are handled first.
        """
        self._now = max(self._now, now)
        if self.phase is Phase.CREATED:
            if isinstance(event, seen.JobStarted):
                self._worlds.start(self._now)
                self._scheduler.launch_all()
            elif isinstance(event, seen.CancelRequested):
                self._worlds.fail(JobCancelledError(event.why), self._now)
        elif self.phase not in ENDED and (answer := self._answers.get(type(event))):
            answer(event, self._now)
        # a heartbeat without consequences must stay cheap: there are hundreds a second
        if self._context.commands or not isinstance(event, (seen.WorkerAlive, seen.AgentAlive)):
            self._worlds.evaluate(self._now)
        commands = list(self._context.commands)
        self._context.commands.clear()
        return commands

    # --- the job, its executors and hosts ---------------------------------------------------------

    def _on_address_lost(self, event: seen.AddressLost, now: float) -> None:
        worker = self.registry.workers.get(event.worker)
        if worker is not None:
            self._worlds.on_address_lost(worker, now)

    def _on_executor_lost(self, event: seen.ExecutorLost, now: float) -> None:
        lost = LossCause(LossKind.EXECUTOR_LOST, name=event.executor, because=event.cause)
        for agent in self._scheduler.executor_lost(event.executor):
            self._send_home(agent, lost, now)

    def _on_hosts_observed(self, event: seen.HostsObserved, now: float) -> None:
        if self._scheduler.observe_hosts(event.hosts):
            self._review(None, now)

    # --- workers ----------------------------------------------------------------------------------

    def _on_worker_alive(self, event: seen.WorkerAlive, now: float) -> None:
        worker = self.registry.workers.get(event.worker)
        if worker is None or worker.state is DONE or worker.raised:
            return
        self._silence.start(worker.id, now)
        worker.heard_at = now
        worker.blocked_s = event.blocked_s
        if event.blocked_s is not None:
            paused_s = paused_within(event.blocked_s, now, self._pauses)
            if event.blocked_s >= self.settings.stall_timeout_s + paused_s:
                self._worlds.on_blocked(now)
        self._judge_raised(now)
        self._worlds.note_after_loop(worker, event.after_loop, now)
        if event.version is None:
            return
        self._worlds.note_version(event.version, now)
        if event.begun == self.registry.round:
            self._crashes.note_training(event.begun)
            self._judge_crashes(now)
        if worker.state is TRAINING:
            first = worker.version is None
            worker.version = event.version
            if first:  # members may leave now that had to wait for another member to hold the state
                self._worlds.consider_interrupt(now)

    def _on_worker_ready(self, event: seen.WorkerReady, now: float) -> None:
        worker = self.registry.workers.get(event.worker)
        if worker is None or worker.state is DONE:
            return
        self._silence.start(worker.id, now)
        worker.heard_at = now
        self._workers_can_start()
        if event.round != worker.round or worker.state is READY:
            return  # of an older round, or a repeat
        if worker.state is ADMITTED and event.loop <= worker.loop:
            return  # it skips to a later loop
        if worker.state is BOOTING and event.at_init:
            self._worlds.on_at_init(worker, now)
            if self.settings.restarts_world:  # members may leave now that had to stay
                self._worlds.consider_interrupt(now)
            if self.settings.restart_interval_s is not None:
                self._growth_timer.set(0, max(now, self._context.world_began_at + self.settings.restart_interval_s))
        elif worker.state is not AT_INIT and not (event.at_init and worker.state is ADMITTED):
            if event.version is not None:
                self._worlds.note_version(event.version, now)
            self._worlds.on_ready(worker, event.version, event.loop, now)

    def _on_worker_done(self, event: seen.WorkerDone, now: float) -> None:
        worker = self.registry.workers.get(event.worker)
        if worker is None or event.run != worker.run or worker.state not in (BOOTING, ADMITTED, TRAINING):
            return  # an older call of the function, or a repeat
        self._workers_can_start()
        if self._ends_as_asked(worker, now):
            return
        self._worlds.on_done(worker, event.has_loop, now)
        self._judge_raised(now)

    def _workers_can_start(self) -> None:
        self._any_ready = True
        self._verdict_timer.cancel(0)

    def _on_worker_lost(self, event: seen.WorkerLost, now: float) -> None:
        worker = self.registry.workers.get(event.worker)
        if event.exit_code is not None:
            self._crashes.note_exit(event)
        if worker is None:
            self._judge_boot_failures(now)
            self._judge_crashes(now)
        elif worker.raised or self._ends_as_asked(worker, now):
            pass
        elif worker.state is DONE:
            worker.exited = True  # its agent has its result, so the end of the process is no loss
        elif event.exit_code not in self._exits_to_explain(worker):
            self._lose_worker(worker, event, now)
        elif self._exit_timer.due(worker.id) is None:
            # the worker's own channel may still hold a Done or a Raised: wait until it is read to its end
            self._exit_timer.start(worker.id, now)

    def _on_exit_due(self, worker: WorkerId, now: float) -> None:
        closed = LossCause(LossKind.CONNECTION_CLOSED, detail="its agent said nothing of it")
        loss = self._crashes.exits.get(worker) or seen.WorkerLost(worker, closed)
        self._lose_worker(self.registry.workers[worker], loss, now)

    def _exits_to_explain(self, worker: Worker) -> tuple[int | None, ...]:
        """Return the exit codes (None: its channel closed) that are a loss only if nothing tells of a return or error.

        A program for torchrun may end by `os._exit(0)`, which its agent reports as a return.
        """
        may_have_ended = self.settings.restarts_world and worker.state is TRAINING
        return (None, 0, EXIT_RAISED) if may_have_ended else (0,)

    def _lose_worker(self, worker: Worker, loss: seen.WorkerLost, now: float) -> None:
        """Remove a worker whose process is gone, and decide if the job can continue."""
        self._remember_exited(worker)
        if worker.state is BOOTING and not self._any_ready:
            self._boot_failures.append(loss)
            self._judge_boot_failures(now)
            if self.phase in ENDED:
                return
        if worker.state is TRAINING:
            if self.settings.restarts_world:  # it reports no steps: a world that lasts has made some
                if now - self._context.world_began_at >= self.settings.stall_timeout_s:
                    self._crashes.reset()
                self._crashes.note_training(worker.round)
            self._crashes.note_death(worker, now)
        self._worlds.end_worker(worker, loss.cause, now, stop=False, failed=True)
        self._judge_crashes(now)

    def _judge_boot_failures(self, now: float, late: bool = False) -> None:
        """Fail the job if too many processes exited before any worker was ready.

        The agent's report of an exit comes after the channel's end, and has the stderr. `late`: do not wait for it.
        """
        attempts = len(self._boot_failures)
        if self._any_ready or attempts < self.settings.boot_failure_limit:
            return
        exits, newest = self._crashes.exits, self._boot_failures[-1]
        newest = exits.get(newest.worker, newest)
        if late:  # while many fail side by side, the exit of the newest is never known
            known = (exits[each.worker] for each in reversed(self._boot_failures) if each.worker in exits)
            newest = next(known, newest)
        if late or newest.exit_code is not None:
            reason = loss_in_words(newest.cause)
            self._worlds.fail(WorkerStartError(attempts=attempts, reason=reason, stderr_tail=newest.stderr_tail), now)
        elif self._verdict_timer.due(0) is None:
            self._verdict_timer.start(0, now)

    def _judge_crashes(self, now: float) -> None:
        """Fail the job, or exclude the host, if too many worlds in a row were ended by a crashed process."""
        if self.phase in ENDED:
            return
        if not self._crashes.limit_reached(now):
            due = self._crashes.verdict_due_at(now)
            if due is not None:
                self._crash_timer.set(0, due)
            return
        hosts = {member.place.host for member, _ in self._crashes.crashes(now)}
        if len(hosts) == 1:
            host = hosts.pop()
            if self._scheduler.can_do_without(host):
                self._exclusion_timer.set(host, self._scheduler.exclude(host, self._crashes.limit or 0, now))
                self._crashes.reset()
                self._review(None, now)
                return
        furthest = None if self.settings.restarts_world else self._worlds.furthest
        self._worlds.fail(self._crashes.error(furthest, now), now)

    def _on_worker_abandoned(self, event: seen.WorkerAbandoned, now: float) -> None:
        worker = self.registry.workers.get(event.worker)
        if worker is None or worker.state is DONE:
            return
        if worker.state is not TRAINING:  # it was in no world: without a pause it would be restarted without end
            self._scheduler.count_failure(worker.agent, now)
        self._worlds.end_worker(worker, LossCause(LossKind.ABANDONED, detail=event.why), now)

    def _on_worker_raised(self, event: seen.WorkerRaised, now: float) -> None:
        worker = self.registry.workers.get(event.worker)
        if worker is not None and self._ends_as_asked(worker, now):
            return
        if worker is not None and worker.state is not DONE:
            self._remember_exited(worker)
        elif event.worker not in self._exited or (
            self.settings.restarts_world and self._exited[event.worker][0] is not None
        ):
            return
        rank, host = self._exited[event.worker]
        error = UserFunctionError(
            rank=rank,
            host=host,
            error_type=event.error_type,
            error=event.error,
            traceback=event.traceback,
            exit_code=event.exit_code,
        )
        if worker is None or worker.state is not TRAINING or not self.settings.restarts_world:
            self._worlds.fail(error, now)
            return
        worker.raised = True
        for timer in (self._silence, self._exit_timer):
            timer.cancel(worker.id)
        if self._held is None or self._held[1] != self.registry.round:
            self._held = error, self.registry.round, now
            self._held_timer.start(0, now)
        self._judge_raised(now)

    def _judge_raised(self, now: float, late: bool = False) -> None:
        """Fail the job because a member raised, unless a loss may be the reason: it makes the others raise.

        No member is lost if each was heard a moment after the exception. `late`: a loss would be known by now.
        """
        if self._held is None:
            return
        error, round, at = self._held
        if round != self.registry.round or self.phase is not Phase.RUNNING:
            self._held = None  # a loss has ended that world
            return
        others = (worker for worker in self.registry.in_state(TRAINING) if not worker.raised)
        if late or all(worker.heard_at >= at + REPORT_GRACE_S for worker in others):
            self._worlds.fail(error, now)

    def _ends_as_asked(self, worker: Worker, now: float) -> bool:
        """Replace a member that ends, returns or raises after all were asked to end; return whether it is one."""
        asked = self.settings.restarts_world and self.phase is Phase.INTERRUPTED and worker.state is TRAINING
        if asked:
            self._worlds.end_worker(worker, worker.agent.leaving or LossCause(LossKind.WORLD_RESTARTS), now)
        return asked

    def _remember_exited(self, worker: Worker) -> None:
        """Store the rank and host of a worker, in case the error of its function is received after its exit."""
        self._exited[worker.id] = (worker.rank, worker.place.host)
        while len(self._exited) > _EXITS_REMEMBERED:
            del self._exited[min(self._exited)]

    # --- agents and slots -------------------------------------------------------------------------

    def _on_agent_alive(self, event: seen.AgentAlive, now: float) -> None:
        agent = self.registry.agents.get(event.agent)
        if agent is None:
            return
        self._agent_silence.start(agent.id, now)
        worker = agent.worker
        if worker is None or worker.id != event.running or self._silence.due(worker.id) is None:
            return
        # a worker whose own heartbeats are late may be in a long call that holds its interpreter's lock
        if now - worker.heard_at < self.settings.stall_timeout_s:
            self._silence.start(worker.id, now)

    def _on_agent_joined(self, event: seen.AgentJoined, now: float) -> None:
        slot = self.registry.slots.get(event.place.slot)
        if slot is not None and event.agent <= slot.newest:
            return  # a repeat, or an agent that was lost or replaced already
        if slot is not None and slot.agent is not None:
            # Spark ran the task again before the first attempt's channel was seen to close
            self._send_home(slot.agent, LossCause(LossKind.AGENT_REPLACED), now)
        agent = self._scheduler.join(event.agent, event.place, now)
        if agent is not None:
            self._agent_silence.start(agent.id, now)
            self._review(agent.place.host, now)
            self._scheduler.fill(agent, now)

    def _on_slot_ended(self, event: seen.SlotEnded, now: float) -> None:
        slot = self.registry.slots.get(event.slot)
        if slot is None or not slot.launched:
            return
        if slot.agent is not None:
            ended = LossCause(LossKind.TASK_ENDED, because=event.cause)
            self._lose_agent(slot.agent, ended, now)
        self._scheduler.slot_ended(slot, event.cause, event.submitted, now)
        if not self.registry.agents and all(slot.refusals > 1 for slot in self.registry.slots.values()):
            self._worlds.fail(LaunchError(reason=loss_in_words(self._scheduler.causes_of_missing()[0])), now)

    def _on_agent_lost(self, event: seen.AgentLost, now: float) -> None:
        agent = self.registry.agents.get(event.agent)
        if agent is not None:
            self._lose_agent(agent, event.cause, now)
            # Spark may take a second to notice that the task is dead, and would then run it again
            lost = LossCause(LossKind.AGENT_LOST, because=event.cause)
            self._scheduler.withdraw(agent.place.slot, lost, now)

    def _lose_agent(self, agent: Agent, cause: LossCause, now: float) -> None:
        """Remove an agent that is lost, with its worker."""
        self._agent_silence.cancel(agent.id)
        self._crashes.forget_agent(agent.id)
        self._scheduler.count_failure(agent, now)
        worker = agent.worker
        if worker is not None:
            self._worlds.remove(worker, LossCause(LossKind.AGENT_LOST, because=cause), now)
        self._scheduler.remove(agent, now)
        self._review(agent.place.host, now)

    def _send_home(self, agent: Agent, cause: LossCause, now: float) -> None:
        """Remove an agent that may still run, and have it stop."""
        self._context.commands.append(DismissAgent(agent.id, cause))
        self._lose_agent(agent, cause, now)

    def _review(self, host: str | None, now: float) -> None:
        """Take agents (of one host) out of use, or into use again, after a change of what is allowed."""
        changed = self._scheduler.review(host)
        self._vacate([agent for agent in changed if agent.leaving], now)
        for agent in changed:
            self._scheduler.fill(agent, now)

    def _vacate(self, agents: list[Agent], now: float) -> None:
        """Remove the workers of agents that may not be used any more. Members stay until their world can spare them."""
        for agent in agents:
            worker = agent.worker
            if worker is not None and worker.round == 0 and worker.state is not DONE:
                self._worlds.release(worker, now)
            elif worker is None and agent.retiring:
                self._scheduler.refill(agent, now)
        self._worlds.consider_interrupt(now)

    # --- time -------------------------------------------------------------------------------------

    def _on_driver_paused(self, event: seen.DriverPaused, now: float) -> None:
        seconds = event.seconds
        self._pauses.append((now, seconds))
        if seconds < self.settings.heartbeat_timeout_s / 2:
            return  # heartbeats that were sent during the pause are received in time
        # TCP may take about as long as the pause to send again what the peers sent during it
        until = now + min(seconds, _LONGEST_RETRANSMISSION_S) + 2 * self.settings.heartbeat_interval_s
        self._agent_silence.postpone(until)
        self._silence.postpone(until)
        self._held_timer.postpone(until + 2 * self.settings.heartbeat_interval_s)
        self._context.announce(DriverStoodStill(now, seconds))

    def _on_tick(self, _: seen.Tick, now: float) -> None:
        interval_s = self.settings.heartbeat_interval_s
        for silence in (self._agent_silence, self._silence):
            if now > silence.next() + interval_s:  # the driver had no CPU time, and may not have received messages
                silence.postpone(now + interval_s)
        while self.phase not in ENDED and (first := min(self._timers, key=Timer.next)).next() <= now:
            first.ring(now)

    def _on_agent_silent(self, agent_id: AgentId, now: float) -> None:
        agent = self.registry.agents.get(agent_id)
        if agent is not None:  # not dismissed meanwhile
            silent = LossCause(LossKind.SILENT, seconds=self.settings.heartbeat_timeout_s)
            self._send_home(agent, silent, now)
            self._scheduler.withdraw(agent.place.slot, LossCause(LossKind.AGENT_LOST, because=silent), now)

    def _on_worker_silent(self, worker: WorkerId, now: float) -> None:
        silent = self.registry.workers[worker]
        silent_s = now - silent.heard_at
        cause = LossCause(LossKind.SILENT, seconds=self.settings.heartbeat_timeout_s)
        if silent_s >= self.settings.stall_timeout_s:
            cause = LossCause(LossKind.UNRESPONSIVE, seconds=silent_s)
        self._worlds.end_worker(silent, cause, now, failed=True)

    def _on_boot_due(self, worker: WorkerId, now: float) -> None:
        cause = LossCause(LossKind.NOT_READY, seconds=self.settings.start_timeout_s)
        self._worlds.end_worker(self.registry.workers[worker], cause, now, failed=True)

    def _on_exclusion_due(self, host: str, now: float) -> None:
        self._scheduler.end_exclusion(host)
        self._review(None, now)

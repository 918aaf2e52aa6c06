"""The membership machine: events in, commands out. Who trains, in which world, from which state, and until when.

It does nothing itself: no thread, socket, clock or log. `docs/protocol.md` tells the protocol as a whole.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from spark_elastic.errors import JobCancelledError, LaunchError, UserFunctionError, WorkerStartError
from spark_elastic.membership.backoff import Crashes, Death, ProcessExit
from spark_elastic.membership.commands import Announce, Command, DismissAgent, StopWorker
from spark_elastic.membership.deadlines import Silence, Timers
from spark_elastic.membership.events import (
    AgentAlive,
    AgentJoined,
    AgentLost,
    CancelRequested,
    DriverPaused,
    Event,
    ExecutorDecommissioned,
    ExecutorLost,
    HostsObserved,
    JobStarted,
    SlotEnded,
    Tick,
    WorkerAbandoned,
    WorkerAlive,
    WorkerDone,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from spark_elastic.membership.registry import Agent, Worker, WorkerRegistry
from spark_elastic.membership.slots import Places, TimerKey
from spark_elastic.membership.states import Phase, WorkerState
from spark_elastic.membership.timeline import DriverStoodStill
from spark_elastic.membership.topology import AgentId, Place, WorkerId, World
from spark_elastic.membership.worlds import (
    ADMITTED,
    AT_INIT,
    BOOTING,
    DONE,
    ENDED,
    GONE,
    READY,
    REPORT_GRACE_S,
    TRAINING,
    Rounds,
)
from spark_elastic.settings import ElasticSettings

_LOST_REMEMBERED = 100

_LONGEST_RETRANSMISSION_S = 120.0
"""What was sent to a machine that was away is sent again after ever longer pauses, this at most (Linux, TCP_RTO_MAX):
for about as long as it was away, nobody may be heard even though it is back."""
_PAUSES_REMEMBERED = 100


class Membership:
    """One job's membership. `handle` is called by one thread; the views are for that thread too."""

    def __init__(self, settings: ElasticSettings) -> None:
        self.settings = settings
        self._now = float("-inf")
        self._out: list[Command] = []  # shared with the parts below, emptied by `handle`
        self._roster = WorkerRegistry(settings.reset_limit)
        self._timers: Timers[TimerKey] = Timers()
        interval = settings.heartbeat_interval_s
        self._agents_heard: Silence[AgentId] = Silence(settings.heartbeat_timeout_s, interval)
        self._workers_heard: Silence[WorkerId] = Silence(settings.heartbeat_timeout_s, interval)
        self._crashes = Crashes(settings.crash_limit, REPORT_GRACE_S)
        self._places = Places(settings, self._roster, self._timers, self._out)
        self._rounds = Rounds(
            settings, self._roster, self._places, self._timers, self._workers_heard, self._crashes, self._out
        )

        self._lost: dict[WorkerId, tuple[int | None, str]] = {}  # the newest that exited -> (rank, host)
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_PAUSES_REMEMBERED)
        """Of the driver, the newest: when each was over, and how long it was."""
        self._ever_ready = False
        self._boot_failures = 0  # exits in a row before any worker was ever ready; meaningless afterwards
        self._boot_evidence: tuple[WorkerId, str, str] | None = None  # of the newest: who, why, stderr

    # --- what the driver asks ---------------------------------------------------------------------

    @property
    def registry(self) -> WorkerRegistry:
        """The record of the job's workers and worlds, to be read only."""
        return self._roster

    @property
    def phase(self) -> Phase:
        return self._rounds.phase

    @property
    def world(self) -> World | None:
        """The newest world, also while it is being replaced; None before the first."""
        return self._rounds.world

    @property
    def ready_count(self) -> int:
        """Workers that stand and wait for a world."""
        return self._roster.count(AT_INIT) + self._roster.count(READY)

    def worker_states(self) -> dict[WorkerId, WorkerState]:
        """The workers that are there; those that are gone are forgotten."""
        return {worker.id: worker.state for worker in self._roster.workers.values()}

    def place_of(self, worker: WorkerId) -> Place | None:
        """None: unknown, or gone."""
        record = self._roster.workers.get(worker)
        return None if record is None else record.place

    def agent_of(self, worker: WorkerId) -> AgentId | None:
        """None: unknown, or gone."""
        record = self._roster.workers.get(worker)
        return None if record is None else record.agent

    def rank_of(self, worker: WorkerId) -> int | None:
        """Its rank in the last world it was in; None: in none yet, unknown, or gone."""
        record = self._roster.workers.get(worker)
        return None if record is None else record.rank

    def status(self) -> dict[str, Any]:
        """Plain values for people: phase, counts, what is waited for and until when."""
        reason, deadline = self._rounds.waiting
        return {
            "phase": self.phase.value,
            "round": self._rounds.round,
            "size": 0 if self.world is None else self.world.size,
            "resets": self._roster.resets,
            "progress": self._rounds.furthest.steps,
            "agents": len(self._roster.agents),
            "workers": {state.value: self._roster.count(state) for state in WorkerState if state is not GONE},
            "waiting_for": reason,
            "deadline": deadline,
            "error": None if self._rounds.error is None else str(self._rounds.error),
        }

    def next_deadline(self) -> float | None:
        """When to send a Tick if nothing else happens; None: never (before the start, after the end)."""
        if self.phase is Phase.CREATED or self.phase in ENDED:
            return None
        wishes = (self._timers.next(), self._agents_heard.next(), self._workers_heard.next())
        return min((wish for wish in wishes if wish is not None), default=None)

    # --- events -----------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        """What to do about the event, in order. `now`: seconds on a clock that does not go back.

        Deadlines are looked at on a `Tick` only, so that what is already in the driver's inbox is heard first.
        """
        self._now = max(self._now, now)
        if self.phase is Phase.CREATED:
            if isinstance(event, JobStarted):
                self._rounds.begin(self._now)
                self._places.launch_all()
            elif isinstance(event, CancelRequested):
                self._rounds.fail(JobCancelledError(event.why), self._now)
        elif self.phase not in ENDED:
            self._dispatch(event, self._now)
        # a heartbeat without consequences must stay cheap: there are hundreds a second
        if self._out or not isinstance(event, (WorkerAlive, AgentAlive)):
            self._rounds.evaluate(self._now)
        commands = list(self._out)
        self._out.clear()
        return commands

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case WorkerAlive():
                self._on_worker_alive(event, now)
            case AgentAlive():
                self._on_agent_alive(event, now)
            case DriverPaused(seconds):
                self._on_driver_paused(seconds, now)
            case WorkerReady():
                self._on_worker_ready(event, now)
            case WorkerLost():
                self._on_worker_lost(event, now)
            case WorkerDone(worker, in_loop, run):
                record = self._roster.workers.get(worker)
                current = record is not None and run == record.run
                if record is not None and current and record.state in (BOOTING, ADMITTED, TRAINING):  # else: a repeat
                    self._workers_can_start()
                    self._rounds.done(record, in_loop, now)
            case WorkerAbandoned():
                self._on_worker_abandoned(event, now)
            case WorkerRaised():
                self._on_worker_raised(event, now)
            case AgentJoined():
                self._on_agent_joined(event, now)
            case AgentLost(agent, why):
                self._on_agent_lost(agent, why, now)
            case SlotEnded():
                self._on_slot_ended(event, now)
            case ExecutorDecommissioned(executor):
                self._withdraw_places(self._places.decommission(executor), now)
            case ExecutorLost(executor, why):
                self._on_executor_lost(executor, f"executor {executor} is lost: {why}", now)
            case HostsObserved(hosts):
                if self._places.observe(hosts):
                    self._review(None, now)
            case CancelRequested(why):
                self._rounds.fail(JobCancelledError(why), now)
            case Tick():
                self._on_tick(now)
            case JobStarted():
                pass  # a repeat

    # --- workers ----------------------------------------------------------------------------------

    def _on_worker_alive(self, event: WorkerAlive, now: float) -> None:
        worker = self._roster.workers.get(event.worker)
        if worker is None or worker.state is DONE:
            return
        self._workers_heard.heard(worker.id, now)
        worker.heard_at = now
        worker.blocked_s = event.blocked_s
        limit = self.settings.stall_timeout_s
        if event.blocked_s is not None and event.blocked_s >= limit + self._paused_within(event.blocked_s, now):
            self._on_hold_up(now)
        self._rounds.note_place(worker, event.after_loop, now)
        if event.version is None:
            return
        self._crashes.reached(event.version)
        if event.begun == self._rounds.round:
            self._crashes.begun(event.begun)
            self._judge_crashes(now)
        self._rounds.note_version(event.version, now)
        if worker.state is TRAINING:
            first = worker.version is None
            worker.version = event.version
            if first:  # those who should leave may have waited for another holder of the state
                self._rounds.consider_interrupt(now)

    def _on_hold_up(self, now: float) -> None:
        """A member has waited in a collective for too long: for whoever is alive but not in it."""
        limit = self.settings.stall_timeout_s
        members = list(self._roster.in_state(TRAINING))
        idle = [worker for worker in members if worker.blocked_s is None]
        for worker in idle:
            self._evict(
                worker.id, f"the others have waited for it in a collective for stall_timeout ({limit:g} s)", now
            )
        if not idle:
            self._rounds.stalled(f"all {len(members)} members have waited in a collective for {limit:g} s", now)

    def _on_worker_ready(self, event: WorkerReady, now: float) -> None:
        worker = self._roster.workers.get(event.worker)
        if worker is None or worker.state is DONE:
            return
        self._workers_heard.heard(worker.id, now)
        worker.heard_at = now
        self._workers_can_start()
        if event.round != worker.round or worker.state is READY:
            return  # of an older round, or a repeat
        if worker.state is ADMITTED and event.loop <= worker.loop:
            return  # it was told to go on to a later loop
        if worker.state is BOOTING and event.at_init:
            self._rounds.at_init(worker, now)
        elif worker.state is not AT_INIT and not (event.at_init and worker.state is ADMITTED):
            if event.version is not None:
                self._crashes.reached(event.version)
                self._rounds.note_version(event.version, now)
            self._rounds.ready(worker, event.version, event.loop, now)

    def _workers_can_start(self) -> None:
        """One came up: from now on an exit is a failure of its place, not of the way workers are started."""
        self._ever_ready = True
        self._boot_evidence = None
        self._timers.cancel(("verdict", 0))

    def _on_worker_lost(self, event: WorkerLost, now: float) -> None:
        why = event.why if event.exit_code is None else f"{event.why} (exit code {event.exit_code})"
        worker = self._roster.workers.get(event.worker)
        if event.exit_code is not None:
            exit = ProcessExit(event.exit_code, event.stderr_tail, event.oom_kills, event.memory)
            self._crashes.exited(event.worker, exit)
        if worker is None:
            self._hear_more_of_a_boot_failure(event, why, now)
            self._judge_crashes(now)
            return
        if worker.state is DONE:
            worker.exited = True
            return  # its result is with its agent: the process may go
        if event.exit_code == 0:
            # its own channel has the last word: a Done may still be in it, and its end comes after that
            if self._timers.get(("exit", worker.id)) is None:
                self._timers.set(("exit", worker.id), now + REPORT_GRACE_S)
            return
        self._remember(worker)
        if worker.state is BOOTING and not self._ever_ready:
            self._boot_failures += 1
            self._boot_evidence = (worker.id, why, event.stderr_tail)
            if self._boot_failures >= self.settings.boot_failure_limit:
                known = event.exit_code is not None or event.stderr_tail
                self._timers.set(("verdict", 0), now if known else now + REPORT_GRACE_S)
                if known:
                    self._fail_to_start(now)
                    return
        agent = self._roster.agents[worker.agent]
        if worker.state is TRAINING:
            self._crashes.died(
                Death(
                    worker.id,
                    agent.id,
                    worker.place,
                    worker.round,
                    worker.rank or 0,
                    now,
                    after_loop=worker.after_loop,
                    returned=worker.run_again_in == worker.round,
                )
            )
        self._places.failed(agent, now)
        self._take_from(agent, worker, why, now)
        self._judge_crashes(now)

    def _judge_crashes(self, now: float) -> None:
        """Give the job up, or the host, if worlds in a row were ended by a process that crashed."""
        if self.phase in ENDED:
            return
        if not self._crashes.is_full(now):
            due = self._crashes.full_at(now)
            if due is not None:
                self._timers.set(("crash", 0), due)
            return
        hosts = {death.place.host for death, _ in self._crashes.row(now)}
        if len(hosts) == 1:
            host = hosts.pop()
            if self._places.can_do_without(host):
                self._places.exclude(host, f"{self._crashes.limit} worlds in a row crashed there", now)
                self._crashes.forgive()
                self._review(None, now)
                return
        self._rounds.fail(self._crashes.error(self._rounds.furthest, now), now)

    def _hear_more_of_a_boot_failure(self, event: WorkerLost, why: str, now: float) -> None:
        """The agent's report of an exit comes after the channel's end, and it alone has the stderr."""
        if self._boot_evidence is not None and self._boot_evidence[0] == event.worker and event.exit_code is not None:
            self._boot_evidence = (event.worker, why, event.stderr_tail)
            if self._boot_failures >= self.settings.boot_failure_limit:
                self._fail_to_start(now)

    def _fail_to_start(self, now: float) -> None:
        assert self._boot_evidence is not None
        _, why, stderr_tail = self._boot_evidence
        error = WorkerStartError(attempts=self._boot_failures, reason=why, stderr_tail=stderr_tail)
        self._rounds.fail(error, now)

    def _on_worker_abandoned(self, event: WorkerAbandoned, now: float) -> None:
        worker = self._roster.workers.get(event.worker)
        if worker is None or worker.state is DONE:
            return
        if worker.state is not TRAINING:  # it was in no world: without a pause this could spin
            self._places.failed(self._roster.agents[worker.agent], now)
        self._rounds.restart(worker, event.why, now)

    def _on_worker_raised(self, event: WorkerRaised, now: float) -> None:
        worker = self._roster.workers.get(event.worker)
        if worker is not None and worker.state is not DONE:
            self._remember(worker)
        elif event.worker not in self._lost:
            return
        rank, host = self._lost[event.worker]
        error = UserFunctionError(
            rank=rank,
            host=host,
            error_type=event.error_type,
            error=event.error,
            traceback=event.traceback,
        )
        self._rounds.fail(error, now)

    def _remember(self, worker: Worker) -> None:
        """The end of a process may be heard before what it said last: that its function raised."""
        self._lost[worker.id] = (worker.rank, worker.place.host)
        while len(self._lost) > _LOST_REMEMBERED:
            del self._lost[min(self._lost)]

    def _evict(self, worker_id: WorkerId, why: str, now: float) -> None:
        """Remove a worker that is alive but of no use, and have it killed."""
        worker = self._roster.workers.get(worker_id)
        if worker is None:
            return
        agent = self._roster.agents[worker.agent]
        self._out.append(StopWorker(agent.id, worker.id, why))
        self._places.failed(agent, now)
        self._take_from(agent, worker, why, now)

    def _take_from(self, agent: Agent, worker: Worker, why: str, now: float) -> None:
        self._rounds.remove(worker, why, now, graceful=False)
        if agent.retiring:
            self._places.dismiss(agent, agent.leaving, now)
        else:
            self._places.fill(agent, now)

    # --- agents and slots -------------------------------------------------------------------------

    def _on_agent_alive(self, event: AgentAlive, now: float) -> None:
        agent = self._roster.agents.get(event.agent)
        if agent is None:
            return
        self._agents_heard.heard(agent.id, now)
        worker = self._roster.worker_of(agent)
        if worker is None or worker.id != event.running or worker.id not in self._workers_heard:
            return
        # one whose own heartbeats are late may be in a long call that holds its interpreter's lock
        if now - worker.heard_at < self.settings.stall_timeout_s:
            self._workers_heard.heard(worker.id, now)

    def _on_agent_joined(self, event: AgentJoined, now: float) -> None:
        slot = self._roster.slots.get(event.place.slot)
        if slot is not None and event.agent <= slot.newest:
            return  # a repeat, or an agent that was lost or replaced already
        if slot is not None and slot.agent is not None:
            # Spark ran the task again before the first attempt's channel was seen to close
            self._send_home(self._roster.agents[slot.agent], "a newer agent has its slot", now)
        agent = self._places.join(event.agent, event.place, now)
        if agent is not None:
            self._agents_heard.heard(agent.id, now)
            self._review(agent.place.host, now)
            self._places.fill(agent, now)

    def _on_slot_ended(self, event: SlotEnded, now: float) -> None:
        slot = self._roster.slots.get(event.slot)
        if slot is None or not slot.launched:
            return
        if slot.agent is not None:
            self._lose_agent(slot.agent, f"its task ended: {event.why}", now)
        self._places.slot_ended(slot, event.why, event.submitted, now)
        if refused := self._places.refused():
            self._rounds.fail(LaunchError(reason=refused), now)

    def _on_executor_lost(self, executor: str, why: str, now: float) -> None:
        agents = self._places.executor_gone(executor)
        for agent in agents:
            self._send_home(agent, why, now)

    def _on_agent_lost(self, agent_id: AgentId, why: str, now: float) -> None:
        agent = self._roster.agents.get(agent_id)
        if agent is not None:
            self._lose_agent(agent_id, why, now)
            # Spark may take a second to see it, and would then run the task once more by itself
            self._places.withdraw(agent.place.slot, f"its agent is lost: {why}", now)

    def _lose_agent(self, agent_id: AgentId, why: str, now: float) -> None:
        agent = self._roster.agents.get(agent_id)
        if agent is None:
            return
        self._agents_heard.forget(agent_id)
        self._crashes.agent_lost(agent_id)
        self._places.failed(agent, now)
        worker = self._roster.worker_of(agent)
        if worker is not None:
            self._rounds.remove(worker, f"its agent is lost: {why}", now, graceful=False)
        self._places.forget(agent, now)
        self._review(agent.place.host, now)

    def _send_home(self, agent: Agent, why: str, now: float) -> None:
        """Give up an agent that may still be running: should it come back to life, it is to stop."""
        self._out.append(DismissAgent(agent.id, why))
        self._lose_agent(agent.id, why, now)

    def _review(self, host: str | None, now: float) -> None:
        changed = self._places.review(host)
        self._withdraw_places([agent for agent in changed if agent.leaving], now)
        for agent in changed:
            self._places.fill(agent, now)

    def _withdraw_places(self, agents: list[Agent], now: float) -> None:
        """These places are not to be used any more. Members stay until their world can spare them."""
        for agent in agents:
            worker = self._roster.worker_of(agent)
            if worker is not None and worker.round == 0 and worker.state is not DONE:
                self._rounds.release(worker, agent.leaving, now)
            elif worker is None and agent.retiring:
                self._places.dismiss(agent, agent.leaving, now)
        self._rounds.consider_interrupt(now)

    # --- time -------------------------------------------------------------------------------------

    def _on_driver_paused(self, seconds: float, now: float) -> None:
        self._pauses.append((now, seconds))
        if seconds < self.settings.heartbeat_timeout_s / 2:
            return  # what was sent meanwhile arrives in time
        until = now + min(seconds, _LONGEST_RETRANSMISSION_S) + 2 * self.settings.heartbeat_interval_s
        self._agents_heard.excuse(until)
        self._workers_heard.excuse(until)
        self._out.append(Announce(DriverStoodStill(now, seconds)))

    def _paused_within(self, last_s: float, now: float) -> float:
        """How much of the last seconds, which went on for the workers, the driver stood still."""
        total = 0.0
        for at, seconds in reversed(self._pauses):
            if at <= now - last_s:
                break
            total += seconds
            last_s -= seconds
        return total

    def _on_tick(self, now: float) -> None:
        timeout = self.settings.heartbeat_timeout_s
        for agent_id in self._agents_heard.expired(now):
            agent = self._roster.agents.get(agent_id)
            if agent is None:
                continue  # dismissed meanwhile
            self._send_home(agent, f"silent for {timeout:g} s", now)
            self._places.withdraw(agent.place.slot, f"the agent was silent for {timeout:g} s", now)
        for worker_id in self._workers_heard.expired(now):
            silent_s = now - self._roster.workers[worker_id].heard_at
            why = f"silent for {timeout:g} s"
            if silent_s >= self.settings.stall_timeout_s:
                why = f"silent for {silent_s:.0f} s, longer than stall_timeout, although its process runs"
            self._evict(worker_id, why, now)
        while self.phase not in ENDED and (key := self._timers.pop(now)) is not None:
            self._on_timer(*key, now)

    def _on_timer(self, kind: str, number: int, now: float) -> None:
        match kind:
            case "boot":
                limit = self.settings.start_timeout_s
                self._evict(number, f"not ready within start_timeout ({limit:g} s)", now)
            case "stall":
                if self._rounds.wait_longer(number, now):
                    return
                limit = self.settings.stall_timeout_s
                self._evict(number, f"did not come to the next round within stall_timeout ({limit:g} s)", now)
            case "exit":
                self._on_worker_lost(WorkerLost(number, "exited with 0 before its function returned"), now)
            case "launch":
                self._places.launch(self._roster.slots[number])
            case "crash":
                self._judge_crashes(now)
            case "exclusion":
                self._places.readmit(number)
                self._review(None, now)
            case "fill":
                self._places.fill(self._roster.agents[number], now)
            case "end":
                self._places.withdraw(number, "its agent is gone and its task does not end", now)
            case "notice":
                self._rounds.notice_due(now)
            case "verdict":
                self._fail_to_start(now)
            case "gather":
                pass  # the evaluation that follows every event sees the deadline

"""The decisions about the next world: its members and their ranks, and when to stop waiting for more workers.

Most are pure functions; the class `Quorum` applies them while a job waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_elastic.errors import JobError, NotEnoughSlotsError, UnequalStepsError
from spark_elastic.membership.deadlines import Timer
from spark_elastic.membership.failures import RegroupBackoff
from spark_elastic.membership.ranking import assign
from spark_elastic.membership.reasons import (
    LossKind,
    Wait,
    WaitKind,
    WorldChange,
    WorldChangeKind,
    change_in_words,
    counted,
    loss_in_words,
    missing_in_words,
    worlds_in_words,
)
from spark_elastic.membership.registry import ADMITTED, AT_INIT, BOOTING, READY, TRAINING, Worker, WorkerRegistry
from spark_elastic.membership.slots import MachineContext, SlotScheduler
from spark_elastic.membership.topology import WorkerId, World
from spark_elastic.settings import ElasticSettings

_MOST_CAUSES_NAMED = 5
_MOST_RANKS_NAMED = 8


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision to build the next world now, to wait for more workers, or to give up."""

    go: bool
    wait: Wait | None = None  # what to wait for; None: build it, or give up
    deadline: float = float("inf")  # when the answer changes if nothing happens


def _standing(worker: Worker) -> tuple[int, int, int]:
    version = worker.version
    return (0, 0, 0) if version is None else (version.loop, version.steps, version.marks)


def _by_merit(worker: Worker) -> tuple[tuple[int, int, int], float, WorkerId]:
    """Return the sort key that puts the most advanced first, and the oldest first among equals."""
    old_rank = float("inf") if worker.rank is None else worker.rank
    loop, steps, marks = _standing(worker)
    return (-loop, -steps, -marks), old_rank, worker.id


def select(candidates: Iterable[Worker], done: int, minimum: int) -> list[Worker]:
    """Select the members of the next world: all that stay, and those that should leave but are still needed.

    A leaving worker is kept while the others, with the `done` ones, are fewer than `minimum`, or while it alone holds
    the most advanced state: without it, applied steps would be lost.
    """
    staying: list[Worker] = []
    leaving: list[Worker] = []
    for worker in candidates:
        (leaving if worker.agent.leaving else staying).append(worker)
    leaving.sort(key=_by_merit)
    spared = max(0, min(minimum - done - len(staying), len(leaving)))
    if leaving and spared == 0 and _standing(leaving[0]) > max(map(_standing, staying), default=(0, 0, 0)):
        spared = 1
    return staying + leaving[:spared]


def interruption(context: MachineContext, now: float) -> WorldChange | None:
    """Return why a running world is to be replaced by another one; None: it is not.

    Workers that are ready join it. Members that leave are spared while some stay, the world has more than `minimum`
    members, and the state does not leave with them.
    """
    registry = context.registry
    if context.settings.restarts_world:
        return _planned_restart(registry, context.settings, now - context.world_began_at)
    newcomers, spare = registry.count(READY), registry.count(TRAINING) - context.settings.min_num_proc
    if newcomers:
        return WorldChange(WorldChangeKind.NEWCOMERS, have=newcomers)
    leaving = [worker for worker in registry.in_state(TRAINING) if worker.agent.leaving]
    staying = [worker for worker in registry.in_state(TRAINING) if not worker.agent.leaving]
    leaving_holds, staying_holds = (any(worker.version is not None for worker in each) for each in (leaving, staying))
    if leaving and staying and spare > 0 and (staying_holds or not leaving_holds):
        return WorldChange(WorldChangeKind.LEAVING, cause=leaving[0].agent.leaving)
    return None


def _planned_restart(registry: WorkerRegistry, settings: ElasticSettings, lasted_s: float) -> WorldChange | None:
    """Return why the workers of a world that has lasted so long all start again; None: they train on.

    An executor that Spark takes away ends in any case, so its members are asked to save first, whatever the minimum.
    """
    members, newcomers = list(registry.in_state(TRAINING)), registry.count(AT_INIT)
    leaving = [worker.agent for worker in members if worker.agent.leaving]
    if any(worker.raised for worker in members):
        return None  # this world is about to break, or the job to fail
    enough = len(members) - len(leaving) + newcomers >= settings.min_num_proc
    if leaving and (enough or any(agent.retiring for agent in leaving)):
        return WorldChange(WorldChangeKind.LEAVING, cause=leaving[0].leaving)
    if newcomers and settings.restart_interval_s is not None and lasted_s >= settings.restart_interval_s:
        return WorldChange(WorldChangeKind.NEWCOMERS, have=newcomers)
    return None


def patience_s(settings: ElasticSettings, change: WorldChange) -> float:
    """Return how long the members of a world may take to stop for the next one.

    Where all start again, it is short for a newcomer: ranks that stop at different steps wait for one another.
    """
    for_newcomers = settings.restarts_world and change.kind is WorldChangeKind.NEWCOMERS
    return settings.heartbeat_timeout_s if for_newcomers else settings.stall_timeout_s


def survivors_wait(registry: WorkerRegistry, left_s: float) -> Wait:
    """Return the wait for the survivors of a broken world, which have `left_s` seconds to come back."""
    survivors = registry.states[TRAINING].values()
    return Wait(
        WaitKind.SURVIVORS,
        have=len(survivors),
        left_s=left_s,
        round=registry.round,
        ranks=ranks_of(survivors) if len(survivors) <= _MOST_RANKS_NAMED else (),
        finishing=registry.after_loop(),
    )


def build_world(round: int, members: Sequence[Worker]) -> World:
    """Build the world of these members. Its root is the most advanced one, the oldest among equals."""
    ranked = assign(
        {worker.id: worker.place for worker in members},
        {worker.id: worker.rank for worker in members if worker.rank is not None},
    )
    best = min(members, key=_by_merit)
    same = all(worker.version == best.version for worker in members)
    if best.version is None:
        return World(round, ranked, root=0, version=None, sync=True)
    root = next(member.rank for member in ranked if member.worker == best.id)
    return World(round, ranked, root=root, version=best.version, sync=not same)


def unequal_steps(members: Sequence[Worker], done: Sequence[Worker]) -> UnequalStepsError | None:
    """Return which ranks have left the collectives that all others of a world wait in; None if none has.

    A rank whose function has returned (`done`) takes part in none, and one after its elastic loop in none of that loop.
    """
    in_loop = [worker.version for worker in members if worker.blocked_s is not None and not worker.after_loop]
    furthest = max(filter(None, in_loop), default=None)
    left = [*done]
    if furthest is not None:
        left += [worker for worker in members if worker.after_loop and _standing(worker)[0] == furthest.loop]
    waiting = [worker for worker in members if worker not in left]
    if not left or not waiting or any(worker.blocked_s is None for worker in waiting):
        return None
    return UnequalStepsError(
        left=ranks_of(left), waiting=ranks_of(waiting), step=None if furthest is None else furthest.steps
    )


def left_early(change: WorldChange, done: Sequence[Worker], step: int) -> UnequalStepsError | None:
    """Return which members had returned when a collective failed that another one waited for, or None.

    A member that calls `hvd.shutdown()` at its end lets those fail that still wait for it.
    """
    abandoned = change.cause is not None and change.cause.kind is LossKind.ABANDONED
    if not done or not (abandoned or change.kind is WorldChangeKind.COLLECTIVE_FAILED):
        return None
    return UnequalStepsError(left=ranks_of(done), waiting=(change.rank or 0,), step=None if done[0].plain else step)


def ranks_of(workers: Iterable[Worker]) -> tuple[int, ...]:
    return tuple(sorted(worker.rank or 0 for worker in workers))


class Quorum:
    """Decides when enough workers are ready for the next world. It only reads the registry."""

    def __init__(self, context: MachineContext, scheduler: SlotScheduler) -> None:
        self._settings = context.settings
        self._registry = context.registry
        #: Only makes a `Tick` come: after each event, `evaluate` compares the time with the deadline itself.
        self.timer = Timer[int](context.timers, lambda _, now: None)
        self._scheduler = scheduler
        self._since, self._until = 0.0, 0.0  # the present wait of the job
        self._setting = "start_timeout"  # the setting that says how long it may last
        #: Since when min_num_proc workers are ready for the first world; None: they are not.
        self._enough_since: float | None = None
        self.backoff = RegroupBackoff(context.settings)

    def start(self, setting: str, now: float) -> None:
        """Begin to wait. `setting`: the name of the timeout, "start_timeout" or "elastic_timeout"."""
        limit_s = self._settings.start_timeout_s if setting == "start_timeout" else self._settings.elastic_timeout_s
        self._since, self._until, self._setting = now, now + limit_s, setting
        self._enough_since = None
        self.timer.set(0, self._until)

    def wanted(self) -> int:
        """Return how many workers a world without a state waits for: when all start again, those that have an agent."""
        if not self._settings.restarts_world or not self._registry.round:
            return self._settings.num_proc
        usable = sum(not (agent.leaving or agent.doomed) for agent in self._registry.agents.values())
        return max(usable, self._settings.min_num_proc)

    def first_world(self, ready: int, now: float) -> Decision:
        """Decide if `ready` workers are enough for a world that starts without a state."""
        need, want, deadline = self._settings.min_num_proc, self.wanted(), self._until
        if ready < need:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        if ready >= want:
            return Decision(go=True)
        if self._enough_since is not None:
            grace_s = self._settings.start_grace_s
            if self._settings.restarts_world and self._registry.count(BOOTING):
                # one that is left out would be a newcomer, for which all start again after `restart_interval`
                grace_s = max(grace_s, self._settings.heartbeat_timeout_s)
            until = min(self._enough_since + grace_s, deadline)
            if now >= until:
                return Decision(go=True)
            return Decision(False, Wait(WaitKind.GRACE, ready, want, need, until - now), until)
        return self._wait_until_deadline(Wait(WaitKind.MINIMUM, ready, want, need, deadline - now), now)

    def next_world(self, have: int, now: float) -> Decision:
        """Decide if `have` workers (with those that are done) are enough to continue from their state."""
        need = self._settings.min_num_proc
        if have >= need:
            return self.paced(Decision(go=True), now)
        return self._wait_until_deadline(Wait(WaitKind.REPLACEMENTS, have, 0, need, self._until - now), now)

    def _wait_until_deadline(self, wait: Wait, now: float) -> Decision:
        return Decision(False, None if now >= self._until else wait, self._until)

    def paced(self, decision: Decision, now: float) -> Decision:
        """Return the decision, or one to wait during a pause after worlds that broke with no worker lost."""
        until = self.backoff.retry_at
        if not decision.go or until <= now:
            return decision
        return Decision(False, Wait(WaitKind.RETRY, self.backoff.count, left_s=until - now), until)

    def not_enough(self, have: int, last_loss: str, now: float) -> NotEnoughSlotsError:
        """Return the error for too few workers in time."""
        registry, booting = self._registry, self._registry.count(BOOTING)
        detail = (
            f"{counted(len(registry.agents), 'agent')} had joined, {counted(booting, 'worker')} "
            f"{'was' if booting == 1 else 'were'} still booting, {registry.count(ADMITTED)} building their model; "
            f"last loss: {last_loss}"
        )
        causes = self._scheduler.causes_of_missing()
        if missing := missing_in_words(causes):
            detail += f"; {missing}"
        unused = sorted({loss_in_words(agent.leaving) for agent in registry.agents.values() if agent.leaving})
        if unused:
            detail += f"; agents that are not used: {'; '.join(unused[:_MOST_CAUSES_NAMED])}"
        need, waited_s = self._settings.min_num_proc, now - self._since
        unreachable = bool(causes) and causes[0].root.kind is LossKind.UNREACHABLE
        return NotEnoughSlotsError(
            have=have, need=need, waited_s=waited_s, setting=self._setting, detail=detail, unreachable=unreachable
        )

    def unreachable_peers(self, change: WorldChange) -> JobError:
        """Return the error for consecutive worlds that broke with no worker lost."""
        return JobError(
            f"{worlds_in_words(self.backoff.count)} broke before they applied a step, with no worker lost "
            f"(last: {change_in_words(change)}); check that the workers reach one another: name the interfaces to use "
            "in nics, and look for a firewall between the hosts"
        )

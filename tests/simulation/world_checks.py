"""The invariants of a world as it is published, its ranks and the state that it starts from; and of a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_elastic import errors
from spark_elastic.membership.topology import BEGINNING, World

if TYPE_CHECKING:
    from tests.simulation.checker import Checker


class Violation(AssertionError):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def check_ranks(checker: Checker, world: World, previous: World | None) -> None:
    """Require ranks host by host, survivors in their order, newcomers behind them."""
    members = world.members
    require([m.rank for m in members] == list(range(len(members))), "ranks are not 0..size-1 in order")
    hosts = [m.place.host for m in members]
    blocks = [h for i, h in enumerate(hosts) if i == 0 or hosts[i - 1] != h]
    require(len(blocks) == len(set(blocks)), f"a host's ranks are apart: {hosts}")
    if previous is not None:
        # one that was sent on to a later loop comes there as a newcomer does
        old = [m.worker for m in previous.members if m.worker not in checker.admitted]
        survivors = [m.worker for m in members if m.worker in old]
        require(survivors == sorted(survivors, key=old.index), "survivors changed their order")
        if survivors:
            first = members[0].place.host == checker.places[checker.on_agent[survivors[0]]].host
            require(first, "a host of newcomers goes first")
    for host in blocks:
        block = [m for m in members if m.place.host == host]
        require([m.local_rank for m in block] == list(range(len(block))), "local ranks are wrong")
        require({m.local_size for m in block} == {len(block)}, "local sizes are wrong")
        if previous is not None:
            new = [m.worker not in old for m in block]
            require(new == sorted(new), "a newcomer goes before a survivor of its host")
    for local_rank in range(max(hosts.count(h) for h in blocks)):
        column = [m for m in members if m.local_rank == local_rank]
        require([m.cross_rank for m in column] == list(range(len(column))), "cross ranks are wrong")
        require({m.cross_size for m in column} == {len(column)}, "cross sizes are wrong")


def check_state(checker: Checker, world: World) -> None:
    """Require that a world starts from its most advanced member, and that no state is lost."""
    versions = {m.worker: checker.stands[m.worker][1] for m in world.members}
    known = [version for version in versions.values() if version is not None]
    best = max(known, default=None)
    require(world.version == best, f"the world starts at {world.version}, its best member is at {best}")
    if best is None:
        require(not checker.furthest.trained, f"the world starts over although {checker.furthest} was reached")
        require(world.sync, "a first world is not synchronised")
    else:
        root = world.members[world.root].worker
        require(versions[root] == best, "the root is not the most advanced")
        if checker.world is not None:
            ahead = [m.worker for m in checker.world.members if versions.get(m.worker) == best and m.worker in versions]
            require(not ahead or root == ahead[0], "the root is not the oldest of the most advanced")
        require(world.sync == (set(versions.values()) != {best}), f"sync={world.sync} for {versions}")
        if best.loop < checker.furthest.loop:
            at_its_end = best.steps >= checker.cluster.plan.steps
            require(at_its_end, f"{checker.furthest} begins with {best}, which is not the end of the loop before")
    for worker in checker.cluster.workers.values():  # the truth
        if worker.alive and checker._is_live(worker.id) and worker.id not in checker.done and worker.trained:
            if worker.id in versions or checker.cluster.plan.plain:
                continue
            assert worker.version is not None
            require(worker.version <= (best or BEGINNING), f"{worker.version} of worker {worker.id} is lost")


def check_failure(checker: Checker, error: errors.JobError) -> None:
    """Require that a job that fails has a reason, and names the right one."""
    plan, settings = checker.cluster.plan, checker.settings
    holders = [
        w
        for w in checker.cluster.workers.values()
        if w.alive
        and checker._is_live(w.id)
        and w.version is not None
        and w.id not in checker.done
        # the end of the loop before is the beginning of this one, and has none of its steps
        and w.version.is_current_at(checker.furthest)
    ]
    if isinstance(error, errors.StateLostError):
        require(not holders, f"the state is not lost: workers {[w.id for w in holders]} hold it")
    elif isinstance(error, errors.NotEnoughSlotsError):
        require(error.have < settings.min_num_proc, "there are enough workers")
        limit = {"start_timeout": settings.start_timeout_s, "elastic_timeout": settings.elastic_timeout_s}
        require(error.waited_s >= limit[error.setting] - 1e-6, f"gave up after {error.waited_s} s")
    elif isinstance(error, errors.ResetLimitError):
        assert checker.world is not None
        require(checker.world.round - 1 == settings.reset_limit, "the reset limit is not reached")
    elif isinstance(error, errors.RepeatedCrashError):
        # a worker that died before its report may have been further; others may still apply the step of its death
        known = (checker.furthest.loop, checker.furthest.steps - 1)
        row = {round for round, at in checker.cluster.crashes if at >= known}
        least = 2 if not holders else settings.crash_limit or 0
        require(len(row) >= least > 0, f"given up after worlds {sorted(row)}: {error}")
    elif isinstance(error, errors.UnequalStepsError):
        assert checker.world is not None
        require(plan.unequal and checker.world.round > 1, f"given up for nothing: {error}")
    elif isinstance(error, errors.WorkerStartError):
        require(plan.boot_crash > 0 or bool(plan.faults) or plan.unlucky > 0, "no worker failed to start")
        require(error.attempts >= settings.boot_failure_limit, "too few attempts")
    else:
        apart = any(kind == "hosts apart" for _, kind in plan.faults)
        if isinstance(error, errors.UserFunctionError) and plan.restarts:
            # behind a rank that hangs, the collectives of the others time out: no loss is the reason
            excused = apart or plan.raises_at is not None or any(kind == "hang worker" for _, kind in plan.faults)
            require(excused, "the consequence of a loss is taken for the user's bug")
        apart = apart and type(error) is errors.JobError
        require(apart or isinstance(error, errors.UserFunctionError), f"unexpected {error!r}")

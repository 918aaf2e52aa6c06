"""The invariants of a world as it is published: its ranks, and the state that it starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

"""The decisions about worlds, as pure functions of what is known. Each comes with its reason in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spark_elastic.membership.topology import Member, Place, StateVersion, WorkerId, World
from spark_elastic.settings import ElasticSettings

# Who gets which rank: host by host, survivors first and in their old order.


def assign(places: Mapping[WorkerId, Place], old_ranks: Mapping[WorkerId, int]) -> tuple[Member, ...]:
    """Ranks for the workers of `places`; those in `old_ranks` are survivors of the world before.

    Hosts come in the order of their first survivor's old rank, hosts without survivors behind them in the order of
    their lowest worker id. Within a host the survivors keep their order and newcomers follow by worker id. The result
    does not depend on the order of the mappings.

    `local_rank` counts within the host. As in Horovod, `cross_rank` counts the hosts that have a worker of the same
    local rank, and `cross_size` says how many those are.

    Returns: the members in rank order.
    """
    newcomer = len(places) + max(old_ranks.values(), default=0) + 1

    def seniority(worker: WorkerId) -> tuple[int, WorkerId]:
        return old_ranks.get(worker, newcomer), worker

    by_host: dict[str, list[WorkerId]] = {}
    for worker in sorted(places, key=seniority):  # a host appears when its most senior worker does
        by_host.setdefault(places[worker].host, []).append(worker)

    members: list[Member] = []
    cross_sizes: dict[int, int] = {}
    for workers in by_host.values():
        for local_rank in range(len(workers)):
            cross_sizes[local_rank] = cross_sizes.get(local_rank, 0) + 1
    cross_seen: dict[int, int] = {}
    for workers in by_host.values():
        for local_rank, worker in enumerate(workers):
            cross_rank = cross_seen.get(local_rank, 0)
            cross_seen[local_rank] = cross_rank + 1
            members.append(
                Member(
                    worker=worker,
                    place=places[worker],
                    rank=len(members),
                    local_rank=local_rank,
                    local_size=len(workers),
                    cross_rank=cross_rank,
                    cross_size=cross_sizes[local_rank],
                )
            )
    return tuple(members)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could be a member of the next world."""

    worker: WorkerId
    place: Place
    old_rank: int | None
    version: StateVersion | None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, or until when to wait for what. `deadline`: when the answer changes if nothing happens."""

    go: bool
    reason: str
    deadline: float | None = None
    expired: bool = False


def _standing(candidate: Candidate) -> tuple[int, int, int]:
    version = candidate.version
    return (0, 0, 0) if version is None else (version.loop, version.steps, version.marks)


def _by_merit(candidate: Candidate) -> tuple[tuple[int, int, int], float, WorkerId]:
    """Most advanced first; among those the oldest."""
    old_rank = float("inf") if candidate.old_rank is None else candidate.old_rank
    loop, steps, marks = _standing(candidate)
    return (-loop, -steps, -marks), old_rank, candidate.worker


def select(candidates: Iterable[Candidate], done: int, minimum: int) -> list[Candidate]:
    """The members of the next world: all that stay, and those that should leave but cannot be spared yet.

    A leaving worker is kept while the others (with the `done` ones) are fewer than `minimum`, or while it alone
    holds the most advanced state: dropping it would lose applied steps.
    """
    staying: list[Candidate] = []
    leaving: list[Candidate] = []
    for candidate in candidates:
        (leaving if candidate.leaving else staying).append(candidate)
    leaving.sort(key=_by_merit)
    spared = max(0, min(minimum - done - len(staying), len(leaving)))
    if leaving and spared == 0 and _standing(leaving[0]) > max(map(_standing, staying), default=(0, 0, 0)):
        spared = 1
    return staying + leaving[:spared]


def can_leave(candidates: Sequence[Candidate], minimum: int) -> bool:
    """Whether any leaving member of a running world can be spared now."""
    staying = [candidate for candidate in candidates if not candidate.leaving]
    if len(staying) == len(candidates) or not staying:
        return False
    holder = any(candidate.version is not None for candidate in candidates)
    staying_holder = any(candidate.version is not None for candidate in staying)
    return len(candidates) > minimum and (staying_holder or not holder)


def build_world(round: int, members: Iterable[Candidate]) -> World:
    """The world of these members; the state comes from the most advanced, the oldest among equals."""
    chosen = {member.worker: member for member in members}
    ranked = assign(
        {worker: member.place for worker, member in chosen.items()},
        {worker: member.old_rank for worker, member in chosen.items() if member.old_rank is not None},
    )
    best = min(chosen.values(), key=_by_merit)
    same = all(member.version == best.version for member in chosen.values())
    if best.version is None:
        return World(round, ranked, root=0, version=None, sync=True)
    root = next(member.rank for member in ranked if member.worker == best.worker)
    return World(round, ranked, root=root, version=best.version, sync=not same)


def start(
    ready: int, settings: ElasticSettings, now: float, *, enough_since: float | None, deadline: float
) -> Decision:
    """Whether a first world can start with `ready` workers.

    `enough_since`: since when `min_num_proc` are ready; `deadline`: when the gathering ends.
    """
    need, want = settings.min_num_proc, settings.num_proc
    if ready >= want:
        return Decision(True, f"{ready} workers ready, {want} wanted")
    if enough_since is not None and ready >= need:
        until = min(enough_since + settings.start_grace_s, deadline)
        if now >= until:
            return Decision(
                True,
                f"{ready} of {want} workers ready after a grace of {settings.start_grace_s:g} s; {need} are enough",
            )
        return Decision(
            False,
            f"{ready} of {want} workers ready; waiting up to {until - now:.0f} s more for the others",
            deadline=until,
        )
    if now >= deadline:
        return Decision(False, f"{ready} of {need} workers ready in time", deadline=deadline, expired=True)
    return Decision(
        False,
        f"{ready} of {want} workers ready; waiting up to {deadline - now:.0f} s for at least {need}",
        deadline=deadline,
    )


def regroup(have: int, settings: ElasticSettings, now: float, *, deadline: float) -> Decision:
    """Whether the workers that stand ready (with those that are done) can go on with their state."""
    need = settings.min_num_proc
    if have >= need:
        return Decision(True, f"{have} workers ready")
    if now >= deadline:
        return Decision(False, f"{have} of {need} workers in time", deadline=deadline, expired=True)
    return Decision(
        False,
        f"{have} of at least {need} workers ready; keeping their state and waiting up to {deadline - now:.0f} s",
        deadline=deadline,
    )

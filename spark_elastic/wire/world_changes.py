"""A world as its difference from the world before, so that what each member receives does not grow with their number.

Most changes of a world concern few members: the others keep their order and their addresses, and the numbers of their
next connections grow by the same amount. `difference` finds what has changed, `changed` applies it. Ranks follow from
the order, and the positions on and across hosts from the ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from spark_elastic.errors import ProtocolError
from spark_elastic.membership.ranking import ranked
from spark_elastic.membership.topology import Place, WorkerId, World
from spark_elastic.wire.messages import Endpoint, MovedMember, Newcomer, WorldAssigned, WorldChanged

_NEWCOMER = -1


def difference(before: WorldAssigned, after: WorldAssigned) -> WorldChanged | None:
    """Return what has changed between two worlds; None if one of them is without endpoints.

    Every member of both that holds `before` gets `after` from it by `changed`.
    """
    if not before.endpoints or not after.endpoints:
        return None
    old_ranks = {member.worker: member.rank for member in before.world.members}
    ranks: list[int] = []
    newcomers: list[Newcomer] = []
    moved: list[MovedMember] = []
    advances: list[int] = []
    for member, endpoint in zip(after.world.members, after.endpoints, strict=True):
        rank = old_ranks.get(member.worker, _NEWCOMER)
        ranks.append(rank)
        if rank == _NEWCOMER:
            newcomers.append(Newcomer(member.worker, member.place, endpoint))
            continue
        old = before.endpoints[rank]
        if _but_for_first(old) == _but_for_first(endpoint):
            advances.append(endpoint.first - old.first)
        else:
            moved.append(MovedMember(member.rank, endpoint))
    world = after.world
    return WorldChanged(
        before=before.world.round,
        round=world.round,
        root=world.root,
        version=world.version,
        sync=world.sync,
        order=tuple(_in_runs(ranks)),
        newcomers=tuple(newcomers),
        moved=tuple(moved),
        advances=tuple(_alike(advances)),
    )


def changed(before: WorldAssigned | None, change: WorldChanged) -> WorldAssigned:
    """Return the world that a change makes of the one before.

    Raises:
        ProtocolError: the change is not one of that world, or its parts contradict one another.
    """
    try:
        return _changed(before, change)
    except ValueError as error:
        raise ProtocolError(f"a change of round {change.before} to round {change.round}: {error}") from None


def _changed(before: WorldAssigned | None, change: WorldChanged) -> WorldAssigned:
    """See `changed`. Raises `ValueError` in its place."""
    known = 0 if before is None else before.world.round
    if before is None or known != change.before or not before.endpoints:
        raise ValueError(f"the round that is known here is {known}")
    size, staying = before.world.size, 0
    newcomers = iter(change.newcomers)
    moved = {each.rank: each.endpoint for each in change.moved}
    advances = _unpacked(change.advances, size)
    workers: list[tuple[WorkerId, Place]] = []
    endpoints: list[Endpoint] = []
    for first, count in _pairs(change.order):
        if count > size + len(change.newcomers):
            raise ValueError(f"{count} members, of {size} and {len(change.newcomers)} newcomers")
        if first == _NEWCOMER:
            came = list(itertools.islice(newcomers, count))
            if len(came) < count:
                raise ValueError(f"{len(change.newcomers)} newcomers, and more in the order")
            workers += [(newcomer.worker, newcomer.place) for newcomer in came]
            endpoints += [newcomer.endpoint for newcomer in came]
            continue
        if first < 0 or first + count > size:
            raise ValueError(f"{count} members from rank {first} on, of {size}")
        staying += count
        if staying > size:
            raise ValueError(f"more than {size} members stay")
        for rank in range(first, first + count):
            member, endpoint = before.world.members[rank], moved.pop(len(workers), None)
            if endpoint is None:
                old, advance = before.endpoints[rank], next(advances, None)
                if advance is None:
                    raise ValueError("members whose next connection has no number")
                endpoint = dataclasses.replace(old, first=old.first + advance)
            workers.append((member.worker, member.place))
            endpoints.append(endpoint)
    left = [next(newcomers, None), next(advances, None), *moved]
    if any(each is not None for each in left):
        raise ValueError("values of members that are not in the order")
    world = World(change.round, ranked(workers), change.root, change.version, change.sync)
    return WorldAssigned(world, tuple(endpoint.address for endpoint in endpoints), tuple(endpoints))


def _but_for_first(endpoint: Endpoint) -> tuple[str, int, str, str, str]:
    return endpoint.address, endpoint.port, endpoint.kind, endpoint.shares, endpoint.note


def _in_runs(ranks: Iterable[int]) -> Iterator[int]:
    """Return pairs of a rank and how many consecutive ones begin with it; or of -1 and how many of it follow."""
    first, count = 0, 0
    for rank in ranks:
        follows = rank == (_NEWCOMER if first == _NEWCOMER else first + count)
        if count and follows:
            count += 1
            continue
        if count:
            yield from (first, count)
        first, count = rank, 1
    if count:
        yield from (first, count)


def _alike(values: Iterable[int]) -> Iterator[int]:
    """Return pairs of a value and how often it is repeated."""
    last, count = 0, 0
    for value in values:
        if count and value != last:
            yield from (last, count)
            count = 0
        last, count = value, count + 1
    if count:
        yield from (last, count)


def _unpacked(pairs: tuple[int, ...], most: int) -> Iterator[int]:
    """Return the values that `_alike` has packed."""
    for value, count in _pairs(pairs):
        if count > most:
            raise ValueError(f"numbers of {count} members, of {most}")
        for _ in range(count):
            yield value


def _pairs(values: tuple[int, ...]) -> list[tuple[int, int]]:
    if len(values) % 2 or any(count < 1 for count in values[1::2]):
        raise ValueError(f"{list(values)[:8]} are not pairs of a value and a number of members")
    return list(zip(values[::2], values[1::2], strict=True))

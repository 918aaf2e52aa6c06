"""The ranks of a world's members: by host, and by seniority on each host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from spark_elastic.membership.topology import Member, Place, WorkerId


def assign(places: Mapping[WorkerId, Place], old_ranks: Mapping[WorkerId, int]) -> tuple[Member, ...]:
    """Assign ranks host by host, survivors (the workers in `old_ranks`) first and in their old order.

    Hosts come in the order of their first survivor's old rank, hosts without survivors behind them in the order of
    their lowest worker id. Within a host the survivors keep their order and newcomers follow by worker id. The result
    does not depend on the order of the mappings.
    """
    newcomer = len(places) + max(old_ranks.values(), default=0) + 1

    def seniority(worker: WorkerId) -> tuple[int, WorkerId]:
        return old_ranks.get(worker, newcomer), worker

    by_host: dict[str, list[WorkerId]] = {}
    for worker in sorted(places, key=seniority):  # a host appears when its most senior worker does
        by_host.setdefault(places[worker].host, []).append(worker)
    return ranked((worker, places[worker]) for workers in by_host.values() for worker in workers)


def ranked(workers: Iterable[tuple[WorkerId, Place]]) -> tuple[Member, ...]:
    """Return the members of a world from its workers in rank order, host by host.

    `local_rank` counts within the host. As in Horovod, `cross_rank` counts the hosts that have a worker of the same
    local rank, and `cross_size` is the number of those hosts.
    """
    in_order = list(workers)
    local_sizes: Counter[str] = Counter()
    local_ranks: list[int] = []
    for _, place in in_order:
        local_ranks.append(local_sizes[place.host])
        local_sizes[place.host] += 1
    cross_sizes = Counter(local_ranks)
    cross_seen = [0] * len(cross_sizes)
    members: list[Member] = []
    for (worker, place), local_rank in zip(in_order, local_ranks, strict=True):
        members.append(
            Member(
                worker=worker,
                place=place,
                rank=len(members),
                local_rank=local_rank,
                local_size=local_sizes[place.host],
                cross_rank=cross_seen[local_rank],
                cross_size=cross_sizes[local_rank],
            )
        )
        cross_seen[local_rank] += 1
    return tuple(members)

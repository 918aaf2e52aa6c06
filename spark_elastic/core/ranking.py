"""Who gets which rank: host by host, survivors first and in their old order."""

from __future__ import annotations

from collections.abc import Mapping

from spark_elastic.core.topology import Member, Place, WorkerId


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

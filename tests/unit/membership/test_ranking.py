from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from spark_elastic.membership.ranking import assign
from spark_elastic.membership.topology import Place

hosts = st.sampled_from("abcd")
crowds = st.dictionaries(st.integers(1, 50), hosts, min_size=1, max_size=12)


def places(crowd: dict[int, str]) -> dict[int, Place]:
    return {worker: Place(host, f"e-{host}", worker) for worker, host in crowd.items()}


def test_a_host_with_survivors_goes_before_a_new_one() -> None:
    members = assign(places({9: "new", 3: "old", 7: "old"}), old_ranks={3: 4})
    assert [(m.worker, m.rank, m.local_rank, m.local_size) for m in members] == [
        (3, 0, 0, 2),
        (7, 1, 1, 2),
        (9, 2, 0, 1),
    ]


def test_cross_ranks_count_only_hosts_that_have_that_local_rank() -> None:
    members = assign(places({1: "a", 2: "b", 3: "b"}), old_ranks={})
    assert [(m.worker, m.cross_rank, m.cross_size) for m in members] == [(1, 0, 2), (2, 1, 2), (3, 0, 1)]


@given(crowds, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(crowd: dict[int, str], rng: random.Random) -> None:
    shuffled = list(crowd.items())
    rng.shuffle(shuffled)
    assert assign(places(crowd), {}) == assign(places(dict(shuffled)), {})


@given(crowds, crowds, st.data())
def test_ranks_are_host_by_host_and_survivors_keep_their_order(
    before: dict[int, str], joining: dict[int, str], data: st.DataObject
) -> None:
    old = {member.worker: member.rank for member in assign(places(before), {})}
    lost = data.draw(st.sets(st.sampled_from(sorted(before)), max_size=len(before) - 1))
    crowd = {w: h for w, h in before.items() if w not in lost} | {w + 100: h for w, h in joining.items()}
    survivors = {worker: old[worker] for worker in crowd if worker in old}

    members = assign(places(crowd), survivors)

    assert [member.rank for member in members] == list(range(len(crowd)))
    blocks = [m.place.host for i, m in enumerate(members) if i == 0 or members[i - 1].place.host != m.place.host]
    assert len(blocks) == len(set(blocks))
    kept = [survivors[m.worker] for m in members if m.worker in survivors]
    assert kept == sorted(kept)
    for host in blocks:
        block = [m for m in members if m.place.host == host]
        assert [(m.local_rank, m.local_size) for m in block] == [(i, len(block)) for i in range(len(block))]
        new = [m.worker not in survivors for m in block]
        assert new == sorted(new)
    for member in members:
        column = [m.worker for m in members if m.local_rank == member.local_rank]
        assert (column[member.cross_rank], len(column)) == (member.worker, member.cross_size)

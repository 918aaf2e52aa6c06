"""The tree over the shards, and sums of partial sums in any world."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spark_elastic.torch as hvd
from spark_elastic.errors import MismatchError
from spark_elastic.exact.sums import PartialSums, ShardReduction, partials_of, rows_of, shards_of, tree_sum
from tests.unit.exact.loops import digest
from tests.unit.worlds import together

counts = st.integers(1, 40)
HOSTS = "127.0.0.1", "127.0.0.2"


@given(counts, st.integers(1, 50))
def test_each_shard_is_computed_by_one_member(count, size):
    shards = [shard for rank in range(size) for shard in shards_of(rank, size, count)]
    assert shards == list(range(count))


@given(counts, st.integers(0, 200))
def test_each_row_is_in_one_shard(count, rows):
    found = [row for shard in range(count) for row in range(*rows_of(shard, count, rows))]
    assert found == list(range(rows))


@given(counts, st.integers(1, 50))
def test_partial_sums_cover_the_shards_and_are_few(count, size):
    nodes = [node for each in partials_of(count, size) for node in each]
    assert [shard for node in nodes for shard in range(*node)] == list(range(count))
    assert all(len(each) <= 2 * count.bit_length() for each in partials_of(count, size))


@pytest.mark.parametrize("count", range(1, 20))
def test_two_members_need_one_addition(count):
    assert sum(map(len, partials_of(count, 2))) <= 2


def leaves(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    made = [torch.randn(300, generator=generator) * 10.0 ** (shard % 7) for shard in range(count)]
    for each in made:
        each[:9] = -0.0
    return made


@given(counts)
def test_one_member_adds_up_in_the_order_of_the_tree(count):
    sums = PartialSums(partials_of(count, 1)[0])
    for leaf in leaves(count):
        sums.add([leaf])
    (total,) = sums.total()
    assert torch.equal(total, tree_sum(torch.stack(leaves(count))))


KINDS = torch.float32, torch.float64, torch.bfloat16, torch.float16


def summed(count: int) -> str:
    """The hash of the sums of four types, in this world; shard 2 is empty."""
    hvd.init()
    reduction = ShardReduction(count)
    like = [torch.empty((3, 4, 5, 5), dtype=kind).to(memory_format=torch.channels_last) for kind in KINDS]
    results = []
    for _ in range(2):
        sums = reduction.partial_sums()
        for shard in reduction.shards():
            leaf = leaves(count)[shard].clamp(-1e4, 1e4).reshape(3, 4, 5, 5)
            sums.add(None if shard == 2 else [torch.empty_like(each).copy_(leaf) for each in like])
        numbers = torch.zeros(3, dtype=torch.float64)
        numbers[0] = 0.1 if hvd.rank() == 0 else 0.0
        results = reduction.exchange(like, sums, numbers)
    assert numbers.tolist() == [0.1, 0.0, 0.0]
    assert all(each.stride() == result.stride() for each, result in zip(like, results, strict=True))
    assert all(result.data_ptr() % 64 == 0 for result in results)
    return digest(results)


@pytest.mark.parametrize(("count", "size", "hosts"), [(2, 3, HOSTS[:1]), (5, 2, HOSTS[:1]), (5, 4, HOSTS)])
def test_sums_have_the_same_bits_in_every_world(count, size, hosts):
    expected = summed(count)
    hvd.shutdown()
    assert together(summed, count, count=size, hosts=hosts) == [expected] * size


def with_other_settings() -> str:
    hvd.init()
    reduction = ShardReduction(4 if hvd.rank() else 5)
    with pytest.raises(MismatchError) as caught:
        reduction.gather(torch.zeros(1, dtype=torch.float64))
    return str(caught.value)


def test_members_with_other_numbers_of_shards_are_reported():
    assert all("5 shards" in said and "4 shards" in said for said in together(with_other_settings))

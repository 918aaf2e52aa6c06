"""ElasticSampler as a data loader uses it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from spark_elastic.collective.process import Position, process
from spark_elastic.torch.elastic import ElasticSampler, TorchState
from spark_elastic.torch.optimizer import DistributedOptimizer


@pytest.fixture(autouse=True)
def _restored_position():
    yield
    process.position = None


def stand_at(rank: int, size: int) -> None:
    process.position = Position(rank=rank, size=size)


def recorded(ranks, batches, steps, batch, seen):
    """Record the first batches of each rank and add their rows to `seen`; return the state, which all ranks share."""
    for sampler, own in zip(ranks, batches, strict=True):
        for number, rows_of_batch in enumerate(own[:steps]):
            sampler.record_batch(number, batch)
            seen += rows_of_batch.tolist()
    states = [sampler.state_dict() for sampler in ranks]
    assert all(s == states[0] for s in states), states
    return states[0]


def samplers(rows: int, size: int, state: dict | None, **kwargs) -> list[ElasticSampler]:
    out = []
    for rank in range(size):
        stand_at(rank, size)
        sampler = ElasticSampler(range(rows), **kwargs)
        if state is not None:
            sampler.load_state_dict(state)
        out.append(sampler)
    return out


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 300), batch=st.integers(1, 13), shuffle=st.booleans())
def test_every_row_is_seen_once_an_epoch_over_any_changes_and_all_ranks_make_equally_many_steps(
    data, rows, batch, shuffle
):
    state, seen, twice_allowed = None, [], 0
    while True:
        size = data.draw(st.integers(1, 5))
        ranks = samplers(rows, size, state, shuffle=shuffle, seed=7)
        loaders = [DataLoader(range(rows), batch_size=batch, sampler=sampler) for sampler in ranks]
        batches = [list(loader) for loader in loaders]
        assert {len(b) for b in batches} == {len(loaders[0])} == {len(loader) for loader in loaders}
        steps = data.draw(st.integers(1, len(loaders[0])))
        state = recorded(ranks, batches, steps, batch, seen)
        if state["processed_num"] == rows:
            twice_allowed += size - 1
            break
    assert set(seen) == set(range(rows))
    assert len(seen) - rows <= twice_allowed


def test_the_order_does_not_depend_on_the_number_of_ranks():
    def first_rows(size: int) -> list[int]:
        streams = [list(sampler) for sampler in samplers(40, size, None)]
        return [streams[position % size][position // size] for position in range(20)]

    assert first_rows(1) == first_rows(2) == first_rows(4)


def test_no_row_is_seen_twice_where_shares_fit_the_batches():
    ranks = samplers(103, 4, None)
    seen = [int(row) for sampler in ranks for batch in DataLoader(range(103), 8, sampler=sampler) for row in batch]
    assert sorted(seen) == list(range(103))


def test_a_batch_that_the_optimizer_takes_in_two_passes_has_as_many_parts_on_every_rank():
    ranks = samplers(145, 2, None)
    for sampler in ranks:
        model = torch.nn.Linear(1, 1)
        named = model.named_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(optimizer, named_parameters=named, backward_passes_per_step=2)
        TorchState(model=model, optimizer=optimizer, sampler=sampler)
    last = [list(DataLoader(range(145), 16, sampler=sampler))[-1] for sampler in ranks]
    assert [len(rows) for rows in last] == [9, 9]


def test_set_epoch_begins_a_new_epoch_and_keeps_one_that_has_begun():
    (sampler,) = samplers(10, 1, None)
    first = list(sampler)
    sampler.record_batch(0, 4)
    sampler.set_epoch(0)
    assert sampler.processed_num == 4
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert sorted(sampler) == sorted(first)
    assert list(sampler) != first


def test_a_reset_distributes_the_remaining_rows_over_the_present_ranks():
    (sampler,) = samplers(10, 1, None, shuffle=False)
    sampler.record_batch(0, 4)
    stand_at(1, 2)
    sampler.reset()
    assert list(sampler) == [5, 7, 9]
    assert sampler.remaining_indices == [4, 5, 6, 7, 8, 9]
    sampler.record_indices([5, 7])
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 8}
    stand_at(0, 1)
    sampler.reset()
    assert list(sampler) == [8, 9]


def test_a_sampler_of_ten_million_rows_costs_no_memory_to_reset():
    import tracemalloc

    tracemalloc.start()
    (sampler,) = samplers(10_000_000, 1, None)
    iterator = iter(sampler)
    next(iterator)
    sampler.reset()
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 300), batch=st.integers(1, 13))
def test_ranks_that_drop_the_last_batch_agree_on_the_rows_that_are_done(data, rows, batch):
    state, seen = None, []
    while True:
        ranks = samplers(rows, data.draw(st.integers(1, 5)), state, seed=7)
        loaders = [DataLoader(range(rows), batch_size=batch, sampler=sampler, drop_last=True) for sampler in ranks]
        batches = [list(loader) for loader in loaders]
        assert {len(b) for b in batches} == {len(loaders[0])}
        if not batches[0]:
            break
        steps = data.draw(st.integers(1, len(batches[0])))
        state = recorded(ranks, batches, steps, batch, seen)
        assert (state["processed_num"] == rows) == (steps == len(batches[0]))
    assert len(seen) == len(set(seen))

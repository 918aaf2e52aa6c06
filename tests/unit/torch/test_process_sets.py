"""Collectives among chosen ranks, in one world and over changes of it."""

from __future__ import annotations

import time

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.negotiation import Negotiation
from spark_elastic.collective.process import process
from spark_elastic.collective.reduce import STALL_S
from tests.unit.torch.test_mismatches import raised
from tests.unit.world_link import die, tell
from tests.unit.worlds import WorldDriver, joined, together


def every_collective():
    ends, middle = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1])
    hvd.init(process_sets=[ends, middle])
    r = hvd.rank()
    mine = ends if ends.included() else middle
    ranks = mine.ranks
    n, place = mine.size(), mine.rank()
    out = [ends.ranks == [0, 2], (ends.process_set_id, middle.process_set_id) == (1, 2), place == ranks.index(r)]
    value = torch.full((n * 2,), float(r))
    out += [
        hvd.allreduce(value, op=hvd.Sum, process_set=mine)[0].item() == sum(ranks),
        hvd.grouped_allreduce([value], op=hvd.Sum, process_set=mine)[0][0].item() == sum(ranks),
        hvd.allgather(torch.tensor([r]), process_set=mine).tolist() == ranks,
        hvd.grouped_allgather([torch.tensor([r])], process_set=mine)[0].tolist() == ranks,
        hvd.broadcast(torch.tensor([r]), ranks[-1], process_set=mine).tolist() == [ranks[-1]],
        hvd.alltoall(torch.full((n,), r), process_set=mine).tolist() == ranks,
        hvd.reducescatter(value, op=hvd.Sum, process_set=mine).tolist() == [float(sum(ranks))] * 2,
        hvd.broadcast_object(r, ranks[-1], process_set=mine) == ranks[-1],
        hvd.allgather_object(r, process_set=mine) == ranks,
        hvd.sparse_allreduce_async(value.to_sparse(), op=hvd.Sum, process_set=mine)().to_dense()[0].item()
        == sum(ranks),
    ]
    hvd.barrier(process_set=mine)
    model = torch.nn.Linear(1, 1)
    hvd.broadcast_parameters(model.state_dict(), ranks[-1], process_set=mine)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=ends)
    hvd.broadcast_optimizer_state(optimizer, ranks[-1], process_set=mine)
    model(torch.full((1, 1), 1.0 + r * r)).sum().backward()
    optimizer.step()
    average_of_ends = (1.0 + 5.0) / 2
    # the one that is not in the optimizer's set steps with its own gradient
    out.append(model.weight.grad.item() == (average_of_ends if ends.included() else 2.0))
    x = torch.ones(2, requires_grad=True)
    (hvd.broadcast(x, ranks[-1], process_set=mine) * 3).sum().backward()
    out.append(x.grad.tolist() == ([3.0, 3.0] if r == ranks[-1] else [0.0, 0.0]))
    return out


@pytest.mark.parametrize("hosts", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2")])
def test_every_collective_can_be_called_on_chosen_ranks(hosts):
    for checks in together(every_collective, count=3, hosts=hosts):
        assert all(checks), checks


def life_of_a_set():
    hvd.init()
    r, out = hvd.rank(), {}
    first = hvd.add_process_set([0, 1])
    out["repr"] = repr(first)
    out["twice"] = raised(lambda: hvd.add_process_set([1, 0]))
    out["not a member"] = raised(lambda: hvd.allreduce(torch.ones(1), process_set=first)) if r == 2 else None
    if first.included():
        hvd.allreduce(torch.ones(1), process_set=first)
        out["root"] = raised(lambda: hvd.broadcast(torch.ones(1), 2, process_set=first))
    out["removed"] = [hvd.remove_process_set(first), hvd.remove_process_set(first)]
    out["standing"] = hvd.remove_process_set(hvd.global_process_set)
    out["unused"] = raised(lambda: first.size())
    again = hvd.add_process_set(first)
    out["again"] = hvd.allgather(torch.tensor([r]), process_set=again).tolist() if again.included() else None
    absent = hvd.add_process_set([7])
    out["absent"] = (absent.size(), absent.included())
    out["wrong"] = [
        raised(lambda wrong=wrong: hvd.add_process_set(wrong)) for wrong in ([0, 0], [-1], ["0"], "01", [True], 3)
    ]
    out["late"] = None
    pair = hvd.add_process_set([0, 2])
    if r == 0:
        time.sleep(3 * STALL_S)  # the other member waits for the first use
    if pair.included():
        out["late"] = hvd.allgather(torch.tensor([r]), process_set=pair).tolist()
    hvd.shutdown()
    hvd.init()
    out["after shutdown"] = raised(lambda: pair.size())
    return out


def test_a_set_is_usable_from_its_adding_to_its_removal():
    results = together(life_of_a_set, count=3)
    for r, out in enumerate(results):
        assert out["repr"] == "ProcessSet(process_set_id=1, ranks=[0, 1])"
        assert out["twice"][0] == "UsageError"
        assert "already" in out["twice"][1]
        if r == 2:
            assert out["not a member"][0] == "UsageError"
            assert "rank 2 is not in" in out["not a member"][1]
        else:
            assert out["root"][0] == "UsageError"
            assert "one of [0, 1]" in out["root"][1]
        assert out["removed"] == [True, False]
        assert out["standing"] is False
        assert out["unused"][0] == "UsageError"
        assert "add_process_set" in out["unused"][1]
        assert out["again"] == ([0, 1] if r < 2 else None)
        assert out["absent"] == (0, False)
        assert all(error is not None and error[0] == "UsageError" for error in out["wrong"])
        assert out["late"] == ([0, 2] if r != 1 else None)
        assert out["after shutdown"][0] == "UsageError"


def over_worlds(worlds: list[int], die_at: int | None):
    """Uses sets that are added before the loop and in it, five times in worlds of each of these sizes."""
    fixed, halves = hvd.ProcessSet([0, 2]), hvd.ProcessSet(lambda size: range(size // 2))
    hvd.init(process_sets=[fixed])
    hvd.add_process_set(halves)
    state = hvd.elastic.ObjectState(step=0, seen=[])
    wanted = dict.fromkeys(worlds, 5)

    @hvd.elastic.run
    def loop(state):
        evens = hvd.add_process_set(range(0, hvd.size(), 2))
        while any(sum(size == of for of, _ in state.seen) < times for size, times in wanted.items()):
            if state.step == die_at and hvd.size() == 3 and hvd.rank() == 1:
                die()
            seen = {}
            for name, chosen in (("fixed", fixed), ("halves", halves), ("evens", evens)):
                if chosen.included():
                    seen[name] = hvd.allgather_object(hvd.rank(), process_set=chosen)
            everyone = hvd.allgather_object(seen)
            if not state.seen or sum(hvd.size() == of for of, _ in state.seen) < 5:
                state.seen.append((hvd.size(), everyone))
            state.step += 1
            if state.step == 5:
                tell("five times")
            state.commit()
        return state.seen

    return loop(state)


THREE = (3, [{"fixed": [0, 2], "halves": [0], "evens": [0, 2]}, {}, {"fixed": [0, 2], "evens": [0, 2]}])
TWO = (2, [{"fixed": [0], "halves": [0], "evens": [0]}, {}])


def test_after_a_loss_a_set_consists_of_its_ranks_that_exist():
    for seen in together(over_worlds, [3, 2], 5, count=3, left=2):
        assert seen == [THREE] * 5 + [TWO] * 5


def test_a_newcomer_takes_part_in_the_sets_that_it_added_before_the_loop():
    results = joined(over_worlds, [2, 3], None, told="five times")
    assert results == [[TWO] * 5 + [THREE] * 5] * 3


def a_newcomer_with_other_sets(steps: int, ranks):
    hvd.init()
    chosen = hvd.add_process_set(ranks)
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < steps and hvd.size() < 3:
            state.step += 1
            state.commit()
        return raised(lambda: hvd.allreduce(torch.ones(1), process_set=chosen))

    return loop(state)


@pytest.mark.nightly
def test_sets_that_a_newcomer_does_not_share_are_an_error_on_every_member():
    with WorldDriver(start_with=2) as driver:
        driver.start(a_newcomer_with_other_sets, 10**9, [0, 1], count=2)
        driver.wait(lambda: driver.worlds)
        driver.start(a_newcomer_with_other_sets, 10**9, [0, 2], count=1)
        for error in driver.results(3):
            assert error is not None
            assert error[0] == "MismatchError"
            assert "rank 0: [[0, 1]]" in error[1]
            assert "rank 2: [[0, 2]]" in error[1]


# --- groups that are used in different orders ----------------------------------------------------------


def when(path) -> None:
    """Wait until a file exists."""
    while not path.exists():
        time.sleep(1e-3)


def waits_in_another_order(folder, queues: str):
    """Wait for two groups in an order that differs between two ranks, each of which first compares the other group.

    Rank 0 waits for the world and rank 1 for the host. Rank 0 begins to compare the host's queues when rank 1 has seen
    that they are not compared yet, and rank 1 then begins to compare those of the world.
    """
    hvd.init()
    rank, begin = hvd.rank(), Negotiation._start
    hvd.allreduce(torch.ones(1), process_set=hvd.local_process_set)

    def begins(negotiation):
        first = negotiation._comparison is None
        is_world = negotiation._group is process.group()
        if first and rank == 0 and not is_world:
            when(folder / "rank 1 is about to begin")
        elif first and rank == 1 and is_world:
            (folder / "rank 1 is about to begin").touch()
            when(folder / "rank 0 has begun")
        begin(negotiation)
        if rank == 0 and not is_world:
            (folder / "rank 0 has begun").touch()

    Negotiation._start = begins
    both = (hvd.global_process_set, hvd.local_process_set)
    mine = torch.tensor([rank])
    if queues == "alike":
        handles = [hvd.allgather_async(mine, process_set=chosen) for chosen in both]
    else:
        handles = [hvd.allreduce_async(mine, op=hvd.Sum, name="a", process_set=chosen) for chosen in both]
        if rank == 0:
            early = [hvd.allreduce_async(mine, op=hvd.Sum, name="b", process_set=chosen) for chosen in both]
    out = [hvd.synchronize(handle).tolist() for handle in (handles if rank == 0 else handles[::-1])]
    if queues != "alike":
        late = early if rank == 0 else [hvd.allreduce_async(mine, op=hvd.Sum, name="b", process_set=c) for c in both]
        out += [hvd.synchronize(handle).tolist() for handle in late]
    return out


@pytest.mark.nightly
@pytest.mark.parametrize("queues", ["alike", "different"])
def test_members_that_compare_two_groups_in_different_orders_do_not_block_one_another(queues, tmp_path):
    expected = [[0, 1]] * 2 if queues == "alike" else [[1]] * 4
    assert together(waits_in_another_order, tmp_path, queues) == [expected] * 2


def uses_a_set_while_another_collective_is_under_way():
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    ones = torch.ones(2)
    if hvd.rank() == 0:
        whole = hvd.allreduce_async(ones, op=hvd.Sum)
        part = hvd.allreduce(ones, op=hvd.Sum, process_set=pair)  # its first use: rank 1 has to come to it, too
        return hvd.synchronize(whole).tolist(), part.tolist()
    whole = hvd.allreduce(ones, op=hvd.Sum)
    part = hvd.allreduce(ones, op=hvd.Sum, process_set=pair) if pair.included() else 2 * ones
    return whole.tolist(), part.tolist()


def test_the_first_use_of_a_set_does_not_block_collectives_under_way():
    assert together(uses_a_set_while_another_collective_is_under_way, count=3) == [([3.0, 3.0], [2.0, 2.0])] * 3

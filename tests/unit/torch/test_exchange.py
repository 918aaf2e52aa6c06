"""Small reductions between hosts in one exchange: what comes out, and what happens when a member is lost."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.exchange import MOST_BYTES, MOST_BYTES_RECEIVED, ExchangeWork, exchangeable
from spark_elastic.collective.process import process
from tests.unit.world_link import die, tell
from tests.unit.worlds import WorldDriver

HOSTS = tuple(f"127.0.0.{number}" for number in range(1, 9))
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
COUNTS = (1, 2, 7, 4095, 70_001)
OPERATORS: dict[hvd.ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    hvd.Sum: torch.add,
    hvd.Product: torch.mul,
    hvd.Min: torch.minimum,
    hvd.Max: torch.maximum,
}


def together(function, count, *args, hosts=HOSTS):
    with WorldDriver(hosts=hosts[:count], start_with=count) as driver:
        driver.start(function, *args, count=count)
        return driver.results(count)


def contribution(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 60, (count,), generator=generator).to(dtype)


def in_rank_order(parts: list[torch.Tensor], combine) -> torch.Tensor:
    """Combine in rank order; 16-bit floats of three and more members are rounded once, at the end."""
    widened = len(parts) > 2 and parts[0].dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if widened else parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total.to(parts[0].dtype)


def reduces_everything():
    hvd.init()
    wrong, digest, exchanged = [], hashlib.sha256(), 0
    for dtype in FLOATS + INTEGERS:
        for count in COUNTS:
            everyone = [contribution(rank, count, dtype) for rank in range(hvd.size())]
            for op, combine in OPERATORS.items():
                got = hvd.allreduce(everyone[hvd.rank()], op=op)
                digest.update(got.view(torch.uint8).numpy().tobytes())
                if not exchangeable(got, op.gloo, hvd.size()):
                    continue
                exchanged += 1
                if not torch.equal(got, in_rank_order(everyone, combine)):
                    wrong.append((dtype, count, op))
    return wrong, exchanged, digest.hexdigest()


@pytest.mark.parametrize("count", [3, 5])
def test_every_type_and_operator_gives_the_sum_in_rank_order_on_all_ranks(count):
    results = together(reduces_everything, count)
    assert [wrong for wrong, _, _ in results] == [[]] * count
    assert all(exchanged >= len(OPERATORS) * len(FLOATS + INTEGERS) * 2 for _, exchanged, _ in results)
    assert len({digest for _, _, digest in results}) == 1


def works_by_size():
    hvd.init()
    group = process.group()
    largest = min(MOST_BYTES, MOST_BYTES_RECEIVED // hvd.size()) // 4
    kinds = []
    small = torch.ones(1), torch.ones(2)
    for tensor in (*small, torch.ones(largest), torch.ones(largest + 1), torch.ones(3, dtype=torch.int8)):
        work = group.allreduce(tensor, hvd.Sum.gloo)
        group.wait(work)
        kinds.append((isinstance(work, ExchangeWork), tensor.unique().tolist()))
    return kinds


def test_single_elements_large_tensors_and_types_that_only_gloo_reduces_use_its_ring():
    for kinds in together(works_by_size, 4):
        assert kinds == [(False, [4.0]), (True, [4.0]), (True, [4.0]), (False, [4.0]), (False, [4])]


def in_any_order():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    small = [hvd.allreduce_async(torch.full((3,), float(r + k)), op=hvd.Sum) for k in range(40)]
    large = hvd.allreduce_async(torch.ones(2_000_000), op=hvd.Sum)
    gathered = hvd.allgather_async(torch.tensor([r]))
    last = hvd.allreduce_async(torch.full((5,), 1), op=hvd.Sum)
    order = (last, gathered, large) if r % 2 else (large, gathered, last)
    got = {id(handle): hvd.synchronize(handle) for handle in order}
    sums = [hvd.synchronize(handle)[2].item() for handle in (reversed(small) if r else small)]
    return (
        sorted(sums) == [sum(q + k for q in range(n)) for k in range(len(small))],
        bool((got[id(large)] == n).all()),
        got[id(gathered)].tolist() == list(range(n)),
        got[id(last)].unique().tolist() == [n],
    )


def test_reductions_of_both_kinds_can_be_waited_for_in_any_order():
    for checks in together(in_any_order, 3):
        assert checks == (True,) * 4


def joins_early():
    hvd.init()
    if hvd.rank() == 0:
        return hvd.join(), []
    sums = [hvd.allreduce(torch.full((4,), 2.0), op=hvd.Sum)[3].item() for _ in range(3)]
    lows = [hvd.allreduce(torch.tensor([5, 7]), op=hvd.Min).tolist()]
    hvd.join()
    return None, sums + lows


def test_a_rank_that_has_joined_takes_part_in_the_exchange():
    _, *others = together(joins_early, 3)
    assert others == [(None, [4.0, 4.0, 4.0, [5, 7]])] * 2


# --- members that are lost ------------------------------------------------------------------------


def loses_a_member(how: str, count: int):
    hvd.init()
    group = process.group()
    tensor = torch.full((count,), 1.0 + hvd.rank())
    if hvd.rank() == 1:
        group.wait(group.allreduce(torch.ones(count), hvd.Sum.gloo))
        if how == "killed while it sends":
            group.allreduce(tensor, hvd.Sum.gloo)
        tell("gone")
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        die()
    start = time.perf_counter()
    error = ""
    try:
        group.wait(group.allreduce(torch.ones(count), hvd.Sum.gloo))
        for _ in range(2):  # the first one may be complete: the lost member may have sent its part
            group.wait(group.allreduce(tensor, hvd.Sum.gloo))
            tensor.fill_(1.0 + hvd.rank())
    except hvd.HorovodInternalError as raised:
        error = str(raised)
    return error, time.perf_counter() - start, tensor.unique().tolist() == [1.0 + hvd.rank()]


@pytest.mark.parametrize("count", [2, 30_000])
@pytest.mark.parametrize("how", ["killed before it sends", "killed while it sends", "stopped"])
def test_a_lost_member_ends_the_exchange_and_the_tensor_keeps_its_values(how, count):
    with WorldDriver(hosts=HOSTS[:4], start_with=4) as driver:
        driver.start(loses_a_member, how, count, count=4)
        driver.wait(lambda: driver.told("gone"))
        if how == "stopped":
            driver.evict(2)
        for error, seconds, kept in driver.results(3):
            assert error
            assert seconds < 30  # milliseconds on an idle machine; Gloo's timeout would be minutes
            assert kept


def sees_it_alone():
    hvd.init()
    hvd.barrier()
    process.link.on_cut(None)
    process.link.cut_round = lambda: 0
    if hvd.rank() == 3:
        die()
    start = time.perf_counter()
    try:
        hvd.allreduce(torch.ones(10))
    except hvd.HorovodInternalError as error:
        return "a collective failed" in str(error), time.perf_counter() - start


def test_all_members_see_a_death_in_an_exchange_without_the_driver():
    with WorldDriver(hosts=HOSTS[:4], start_with=4) as driver:
        driver.start(sees_it_alone, count=4)
        for failed, seconds in driver.results(3):
            assert failed
            assert seconds < 30

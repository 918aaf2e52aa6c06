"""Reductions through memory that the processes of a host share: what comes out, and what is left when it breaks."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time

import psutil
import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective import reduce
from spark_elastic.collective.process import process
from spark_elastic.collective.shared_memory import segments
from spark_elastic.errors import InvalidSettingsError, UsageError
from tests.nightly import by_night
from tests.unit.world_link import die, tell
from tests.unit.worlds import WorldDriver, together

ONE_HOST, TWO_HOSTS = ("127.0.0.1",), ("127.0.0.1", "127.0.0.2")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
COUNTS = (0, 1, 7, 4095, 70_001, reduce.LARGE_CHUNK_BYTES // 2 + 5)
TWICE_ROUNDED = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-14}
OPERATORS = {hvd.Sum: torch.Tensor.sum, hvd.Min: torch.Tensor.amin, hvd.Max: torch.Tensor.amax}

pytestmark = pytest.mark.skipif(not segments.FUTEX_AVAILABLE, reason="words cannot be shared here")


def shares_memory() -> bool:
    return process.group().shared_memory is not None


def contribution(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 60, (count,), generator=generator).to(dtype)


def reduces_everything():
    hvd.init()
    wrong, digest = [], hashlib.sha256()
    for dtype in FLOATS + INTEGERS:
        for count in COUNTS:
            everyone = torch.stack([contribution(r, count, dtype) for r in range(hvd.size())])
            for op, reference in OPERATORS.items():
                expected = reference(everyone.double(), dim=0) if count else torch.empty(0).double()
                got = hvd.allreduce(everyone[hvd.rank()], op=op)
                digest.update(got.view(torch.uint8).numpy().tobytes() if count else b"")
                off = (got.double() - expected).abs() / everyone.double().abs().sum(0).clamp(min=1e-30)
                if count and off.max() > TWICE_ROUNDED.get(dtype, 0):
                    wrong.append((dtype, count, op, off.max().item()))
    return shares_memory(), wrong, digest.hexdigest()


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS], ids=["3", "2 and 1 on two hosts"])
def test_every_type_and_size_is_reduced_to_the_same_bits_everywhere(hosts):
    results = together(reduces_everything, count=3, hosts=hosts)
    assert [shares for shares, _, _ in results] == [hosts == ONE_HOST] * 3
    assert [wrong for _, wrong, _ in results] == [[]] * 3
    assert len({digest for _, _, digest in results}) == 1


def products_and_truth():
    hvd.init()
    product = hvd.allreduce(torch.full((5,), 3.0), op=hvd.Product)
    nan = hvd.allreduce(torch.tensor([float("nan") if hvd.rank() else 1.0]), op=hvd.Max)
    either = hvd.allreduce(torch.tensor([hvd.rank() == 1, False]), op=hvd.Max)  # bool is left to Gloo
    return product.tolist(), bool(nan.isnan().item()), either.tolist()


def test_products_nan_and_a_type_that_only_gloo_reduces():
    assert together(products_and_truth) == [([9.0] * 5, True, [True, False])] * 2


def in_any_order():
    os.environ[reduce.REDUCTION_SETTING] = "shared"
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    first = [hvd.allreduce_async(torch.full((3,), float(r + k)), op=hvd.Sum) for k in range(2 * segments.DEPTH)]
    large = hvd.allreduce_async(torch.full((6_000_000,), 1.0), op=hvd.Sum)
    over_gloo = hvd.allgather_async(torch.tensor([r]))
    other_set = hvd.allreduce_async(torch.full((9,), 2), op=hvd.Sum, process_set=hvd.local_process_set)
    last = hvd.allreduce_async(torch.full((5,), 1), op=hvd.Sum)
    order = (last, over_gloo, large, other_set) if r % 2 else (other_set, large, over_gloo, last)
    got = {id(handle): hvd.synchronize(handle) for handle in order}
    small = [hvd.synchronize(handle)[2].item() for handle in reversed(first)]
    return (
        small == [sum(q + k for q in range(n)) for k in reversed(range(len(first)))],
        bool((got[id(large)] == n).all()),
        got[id(over_gloo)].tolist() == list(range(n)),
        got[id(other_set)].unique().tolist() == [2 * hvd.local_size()],
        got[id(last)].unique().tolist() == [n],
    )


@pytest.mark.parametrize("hosts", [ONE_HOST, TWO_HOSTS], ids=["one host", "two hosts"])
def test_more_reductions_than_free_slots_can_be_waited_for_in_any_order(hosts):
    for checks in together(in_any_order, count=4, hosts=hosts):
        assert checks == (True,) * 5


def only_one_polls():
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(10), op=hvd.Sum)
    if hvd.rank() == 0:
        while not hvd.poll(handle):
            time.sleep(0)
        hvd.broadcast(torch.ones(1), 0)
    else:
        hvd.broadcast(torch.ones(1), 0)  # rank 0 comes here only once the reduction is done
    return hvd.synchronize(handle).tolist()


def test_polling_completes_a_reduction_that_the_other_rank_has_only_launched():
    assert together(only_one_polls) == [[2.0] * 10] * 2


# --- peers that are gone --------------------------------------------------------------------------


def waits_for(how: str):
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        tell("gone", os.getpid())
        if how == "killed":
            die()
        elif how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            hvd.shutdown()
            return None
    tell("waits")
    start = time.perf_counter()
    try:
        hvd.allreduce(torch.ones(200_000))
    except hvd.HorovodInternalError:
        return time.perf_counter() - start


@pytest.mark.parametrize(
    ("how", "hosts"),
    by_night(
        [*((how, ONE_HOST) for how in ("killed", "stopped", "has left")), ("stopped", TWO_HOSTS)],
        but=[("killed", ONE_HOST), ("stopped", TWO_HOSTS)],
    ),
)
def test_a_peer_that_is_gone_ends_the_wait(how, hosts):
    with WorldDriver(hosts=hosts, start_with=3) as driver:
        driver.start(waits_for, how, count=3)
        driver.wait(lambda: driver.told("gone") and len(driver.told("waits")) == 2)  # all have left the barrier
        if how == "stopped":
            driver.evict(driver.world.members[1].worker)
        for seconds in driver.results(2 if how != "has left" else 3):
            assert seconds is None or seconds < 30  # milliseconds on an idle machine; a timeout would be minutes


def without_the_driver():
    hvd.init()
    hvd.barrier()
    process.link.on_cut = lambda round, why: None
    process.link.check_cut = lambda round: None
    if hvd.rank() == 1:
        die()
    try:
        hvd.allreduce(torch.ones(10))
    except hvd.HorovodInternalError as error:
        return str(error)


def test_a_death_is_seen_without_the_driver_too():
    with WorldDriver(start_with=2) as driver:
        driver.start(without_the_driver, count=2)
        (message,) = driver.results(1)
        assert "rank 1 is gone" in message


def belongings():
    me = psutil.Process()
    maps = sum("memfd:spark-elastic" in entry.path for entry in me.memory_maps(grouped=False))
    return me.num_fds(), me.num_threads(), maps


# --- choosing the way -----------------------------------------------------------------------------


def chooses(value: str, breaks: str):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("spark_elastic.collective").addHandler(handler)
    os.environ[reduce.REDUCTION_SETTING] = value
    if breaks:
        _break(breaks)
    try:
        hvd.init()
    except UsageError as error:
        return type(error).__name__, str(error)
    hvd.allreduce(torch.ones(4), process_set=hvd.local_process_set)
    total = hvd.allreduce(torch.ones(4), op=hvd.Sum).tolist()
    return shares_memory(), total, [m for m in messages if "through memory" in m], belongings()[2]


def _break(what: str) -> None:
    """On the second worker only."""
    from tests.unit.world_link import link

    if link().worker != 2:
        return
    if what == "no memfd":

        def refused(*_):
            raise OSError("no memory files here")

        os.memfd_create = refused
    elif what == "other processes":  # as in another process id namespace
        os.readlink = lambda path: "/dev/null"
    elif what == "another job":
        process_key = link().derive_key
        link().derive_key = lambda purpose: process_key(purpose + "!")
    elif what == "setting":
        os.environ[reduce.REDUCTION_SETTING] = "gloo"


@pytest.mark.parametrize(
    "breaks", by_night(["no memfd", "other processes", "another job", "setting"], but=["no memfd"])
)
def test_all_use_gloo_and_warn_once_if_one_cannot_share_memory(breaks):
    results = together(chooses, "auto", breaks)
    for shares, total, messages, mapped in results:
        assert not shares
        assert total == [2.0] * 4
        assert len(messages) <= 1
        assert mapped == 0
    assert any(messages for _, _, messages, _ in results)


def test_the_setting_selects_shared_memory_or_gloo():
    assert together(chooses, "gloo", "") == [(False, [2.0] * 4, [], 0)] * 2
    assert together(chooses, "shared", "") == [(True, [2.0] * 4, [], 4)] * 2
    for kind, message in together(chooses, "shared", "no memfd"):
        assert kind == "UsageError"
        assert "shared, but workers cannot share memory" in message


def test_an_invalid_reduction_setting_is_refused(monkeypatch):
    monkeypatch.setenv(reduce.REDUCTION_SETTING, "fast")
    with pytest.raises(InvalidSettingsError, match="auto, gloo or shared"):
        reduce.reduction_setting()


def joins_unevenly():
    os.environ[reduce.REDUCTION_SETTING] = "shared"
    hvd.init()
    sums = []
    for number in range(3 * hvd.rank()):
        sums.append(hvd.allreduce(torch.ones(400_000), op=hvd.Sum).unique().tolist())
        sums.append(hvd.allreduce(torch.full((2,), number), op=hvd.Min).unique().tolist())
    last = hvd.join()
    return sums[0::2], sums[1::2], last


@pytest.mark.parametrize(("count", "hosts"), [(3, ONE_HOST), (4, TWO_HOSTS)], ids=["one host", "two hosts"])
def test_joined_ranks_take_part_in_reductions(count, hosts):
    for sums, minima, last in together(joins_unevenly, count=count, hosts=hosts):
        assert last == count - 1
        assert minima == [[number] for number in range(len(minima))]
        assert sums == [[float(count - 1 - number // 3)] for number in range(len(sums))]

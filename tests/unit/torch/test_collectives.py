"""Collectives between real processes."""

from __future__ import annotations

import time

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.reduce import STALL_S
from tests.unit.worlds import together


def reductions():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    out = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int32, torch.int64):
        t = torch.tensor([1, 2, 3], dtype=dtype) * (r + 1)
        total = sum(range(1, n + 1))
        out.append(torch.equal(hvd.allreduce(t, op=hvd.Sum), torch.tensor([1, 2, 3], dtype=dtype) * total))
        out.append(torch.equal(hvd.allreduce(t, op=hvd.Max), torch.tensor([1, 2, 3], dtype=dtype) * n))
        out.append(torch.equal(hvd.allreduce(t, op=hvd.Min), torch.tensor([1, 2, 3], dtype=dtype)))
        average = hvd.allreduce(t)
        out.append(average.dtype == dtype)
        out.append(not dtype.is_floating_point or average[0].item() == (n + 1) / 2)
    out.append(hvd.allreduce(torch.tensor(float(r)), name="x").item() == sum(range(n)) / n)
    t = torch.ones(3, 4).t()
    out.append(hvd.allreduce_(t, op=hvd.Sum) is t and bool((t == n).all()))
    handle = hvd.allreduce_async_(torch.full((4,), float(r)), op=hvd.Sum, prescale_factor=2, postscale_factor=0.5)
    out.append(hvd.synchronize(handle).tolist() == [float(sum(range(n)))] * 4)
    out.append(hvd.poll(handle))
    a, b = hvd.grouped_allreduce([torch.full((2,), float(r)), torch.tensor([r])], op=hvd.Sum)
    out.append(a.tolist() == [sum(range(n))] * 2 and b.tolist() == [sum(range(n))])
    out.append(hvd.allreduce(torch.ones(3), compression=hvd.Compression.fp16).dtype == torch.float32)
    out.append(bool(hvd.allreduce(torch.tensor([r == 0]), op=hvd.Max)))
    hvd.barrier()
    return out


def test_every_member_gets_the_same_reduction_for_every_type():
    for checks in together(reductions, count=3):
        assert all(checks), checks


def movements():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    out = []
    gathered = hvd.allgather(torch.full((r, 2), r, dtype=torch.int16))
    out.append(gathered[:, 0].tolist() == [rank for rank in range(n) for _ in range(rank)])
    out.append(hvd.allgather(torch.tensor(r)).tolist() == list(range(n)))
    out.append(hvd.allgather(torch.empty(0, 3)).shape == (0, 3))
    out.append(hvd.broadcast(torch.tensor([r, 7]), 1).tolist() == [1, 7])
    t = torch.full((3, 2), float(r)).t()
    hvd.broadcast_(t, 1)
    out.append(bool((t == 1).all()))
    out.append(hvd.broadcast_object({"rank": r, "big": b"x" * 100_000}, 1)["rank"] == 1)
    out.append(hvd.broadcast_object(("small", r), 0) == ("small", 0))
    out.append(hvd.allgather_object([r] * r) == [[rank] * rank for rank in range(n)])
    received, counts = hvd.alltoall(torch.arange(n * (n + 1) // 2) + 100 * r, splits=list(range(1, n + 1)))
    out.append(counts.tolist() == [r + 1] * n and received[0].item() == r * (r + 1) // 2)
    out.append(hvd.alltoall(torch.full((n,), r)).tolist() == list(range(n)))
    part = hvd.reducescatter(torch.arange(n * 2 + 1.0).reshape(-1, 1), op=hvd.Sum)
    out.append(part.shape[0] == 2 + (r == 0) and part.flatten()[0].item() == n * (2 * r + (r > 0)))
    big = {"a": torch.full((3_000_000,), float(r)), "b": torch.tensor([r], dtype=torch.bool)}
    hvd.broadcast_parameters(big, root_rank=1)
    out.append(big["a"][-1].item() == 1 and big["b"].tolist() == [True])
    return out


def test_every_member_receives_what_the_others_sent():
    for checks in together(movements, count=3):
        assert all(checks), checks


def gradients():
    hvd.init()
    r, n = hvd.rank(), hvd.size()
    out = []
    x = torch.full((2,), 1.0 + r, requires_grad=True)
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    out.append(x.grad.tolist() == [n, n])
    x = torch.ones(r + 1, 2, requires_grad=True)
    (hvd.allgather(x) * (r + 1)).sum().backward()
    out.append(bool((x.grad == sum(range(1, n + 1)) / n).all()))
    x = torch.ones(2, requires_grad=True)
    (hvd.broadcast(x, 0) * 3).sum().backward()
    out.append(x.grad.tolist() == ([3.0, 3.0] if r == 0 else [0.0, 0.0]))
    x = torch.ones(n, requires_grad=True)
    (hvd.alltoall(x) * (r + 1)).sum().backward()
    out.append(x.grad.tolist() == [float(rank + 1) for rank in range(n)])
    x = torch.ones(n, requires_grad=True)
    hvd.reducescatter(x, op=hvd.Sum).sum().backward()
    out.append(x.grad.tolist() == [n] * n)
    return out


def test_gradients_flow_through_collectives_as_with_horovod():
    for checks in together(gradients):
        assert all(checks), checks


def by_host():
    hvd.init()
    local = hvd.allreduce(torch.tensor([1.0 * hvd.rank()]), op=hvd.Sum, process_set=hvd.local_process_set)
    cross = hvd.allgather(torch.tensor([hvd.rank()]), process_set=hvd.cross_process_set)
    return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), local.item(), cross.tolist()


def test_groups_of_a_host_and_across_hosts_are_made_when_they_are_first_used():
    # workers 1 and 3 are on the first host, 2 on the second: ranks 0 and 1, and 2
    results = together(by_host, count=3, hosts=("127.0.0.1", "127.0.0.2"))
    assert results == [(0, 2, 0, 2, 1.0, [0, 2]), (0, 1, 1, 2, 2.0, [0, 2]), (1, 2, 0, 1, 1.0, [1])]


def uneven(batches: dict[int, int]):
    hvd.init()
    r, out = hvd.rank(), []
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in range(2):
        count = batches[(r + epoch) % hvd.size()]
        for number in range(count):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()
            most = hvd.allreduce(torch.tensor([-number]), op=hvd.Max).item()
            rows = hvd.allgather(torch.ones(2)).shape[0]
            out.append((total, rows, most == -number))
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        out.append(last)
    return out, hvd.allgather_object(model.weight.tolist())


def test_a_rank_that_has_joined_takes_part_until_all_have():
    results = together(uneven, {0: 1, 1: 4, 2: 2}, count=3)
    everyone, two, one = (3.0, 6, True), (2.0, 4, True), (1.0, 2, True)
    assert results[0][0] == [everyone, 1, everyone, two, one, one, 0]
    assert results[1][0] == [everyone, two, one, one, 1, everyone, two, 0]
    assert results[2][0] == [everyone, two, 1, everyone, 0]
    assert len({str(models) for _, models in results}) == 1


def joins_beside_a_group_of_its_host():
    """The ranks of host 0 reduce among themselves, one of them late; that of the other host has joined."""
    hvd.init()
    out = []
    if hvd.cross_rank() == 0:
        for _ in range(2):
            if hvd.local_rank():
                # longer than a wait that makes others ask for who has joined
                time.sleep(3 * STALL_S)
            out.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=hvd.local_process_set).item())
        out.append(hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist())
    hvd.join()
    return out


def test_a_joined_rank_takes_no_part_in_collectives_of_groups_within_hosts():
    by_rank = together(joins_beside_a_group_of_its_host, count=3, hosts=("127.0.0.1", "127.0.0.2"))
    assert sorted(by_rank) == [[], [2.0, 2.0, [2.0] * 3], [2.0, 2.0, [2.0] * 3]]


def test_a_world_of_one_needs_no_peers(alone):
    assert (alone.rank(), alone.size(), alone.local_rank(), alone.cross_size()) == (0, 1, 0, 1)
    assert alone.allreduce(torch.tensor([3.0]), prescale_factor=2.0).tolist() == [6.0]
    assert alone.allgather(torch.ones(2, 3)).shape == (2, 3)
    assert alone.allgather_object("x") == ["x"]
    assert alone.alltoall(torch.arange(3), splits=[3])[0].tolist() == [0, 1, 2]
    assert alone.reducescatter(torch.ones(2)).tolist() == [1, 1]
    alone.barrier()


def test_rank_before_init_says_what_to_do():
    with pytest.raises(hvd.NotInitializedError, match=r"hvd\.init\(\)"):
        hvd.rank()


def with_a_default_device():
    hvd.init()
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    rows = torch.ones(3, 2)
    own = torch.full((hvd.rank() + 1,), float(hvd.rank()))
    torch.set_default_device("meta")
    try:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        state = hvd.elastic.TorchState(model, optimizer, step=0)

        @hvd.elastic.run
        def loop(state):
            model(rows).sum().backward()
            optimizer.step()
            state.commit()

        loop(state)
        return (
            hvd.allreduce(own[:1], op=hvd.Sum).tolist(),
            hvd.allgather(own).tolist(),
            hvd.broadcast(own[:1], 1).tolist(),
            hvd.alltoall(own[:1].expand(2).contiguous()).tolist(),
            hvd.broadcast_object("x" * 100_000, 0)[:1],
        )
    finally:
        torch.set_default_device(None)


def test_the_default_device_of_torch_does_not_matter():
    assert together(with_a_default_device) == [([1.0], [0.0, 1.0, 1.0], [1.0], [0.0, 1.0], "x")] * 2

"""What members call is compared before data is sent: a difference is the same error on every one of them."""

from __future__ import annotations

import threading

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.errors import HorovodInternalError, MismatchError, UsageError
from tests.nightly import by_night
from tests.unit.world_link import die
from tests.unit.worlds import together

ONE_HOST, TWO_HOSTS = ("127.0.0.1",), ("127.0.0.1", "127.0.0.2")


def raised(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def differences():
    """Each call differs between rank 0 and the others."""
    hvd.init()
    r = min(hvd.rank(), 1)
    kind = torch.float32 if r else torch.int32
    calls = {
        "allreduce shape": lambda: hvd.allreduce(torch.ones(17 + r)),
        "allreduce dimensions": lambda: hvd.allreduce(torch.ones((2, 6) if r else (2, 2, 3))),
        "allreduce type": lambda: hvd.allreduce(torch.ones(3, dtype=kind)),
        "allreduce operator": lambda: hvd.allreduce(torch.ones(3), op=hvd.Max if r else hvd.Min),
        "allreduce factor": lambda: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + r),
        "allreduce name": lambda: hvd.allreduce(torch.ones(3), name=f"loss {r}"),
        "allreduce in place": lambda: hvd.allreduce_(torch.ones(2 + r)),
        "grouped allreduce": lambda: hvd.grouped_allreduce([torch.ones(2)] * (1 + r)),
        "sparse allreduce": lambda: hvd.sparse_allreduce_async(torch.ones(2 + r, 2).to_sparse())(),
        "allgather type": lambda: hvd.allgather(torch.ones(3, dtype=kind)),
        "allgather rows": lambda: hvd.allgather(torch.ones(3, 2 + r)),
        "grouped allgather": lambda: hvd.grouped_allgather([torch.ones(3, 2 + r), torch.ones(1)]),
        "broadcast shape": lambda: hvd.broadcast(torch.ones(3 + r), 0),
        "broadcast type": lambda: hvd.broadcast(torch.ones(3, dtype=kind), 0),
        "broadcast root": lambda: hvd.broadcast(torch.ones(3), r),
        "alltoall type": lambda: hvd.alltoall(torch.ones(hvd.size(), dtype=kind)),
        "alltoall rows": lambda: hvd.alltoall(torch.ones(hvd.size(), 2 + r)),
        "reducescatter shape": lambda: hvd.reducescatter(torch.ones(4 + r, 2)),
        "reducescatter type": lambda: hvd.reducescatter(torch.ones(4, dtype=kind)),
        "grouped reducescatter": lambda: hvd.grouped_reducescatter([torch.ones(4), torch.ones(4 + r)]),
        "kinds": lambda: hvd.allgather(torch.ones(3)) if r else hvd.allreduce(torch.ones(3)),
        "barrier": lambda: hvd.barrier() if r else hvd.allreduce(torch.ones(3)),
        "object root": lambda: hvd.broadcast_object("x", r),
        "object or tensor": lambda: hvd.broadcast_object("x", 0) if r else hvd.broadcast(torch.ones(3), 0),
        "parameters": lambda: hvd.broadcast_parameters([torch.ones(3 + r)], 0),
        "process set": lambda: hvd.add_process_set([0, r + 5]),
    }
    out = {name: raised(call) for name, call in calls.items()}
    out["afterwards"] = hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist()
    return out


@pytest.mark.parametrize(("count", "hosts"), [(3, ONE_HOST), (2, TWO_HOSTS)])
def test_different_calls_are_one_error_on_every_rank_and_leave_the_world_intact(count, hosts):
    results = together(differences, count=count, hosts=hosts)
    for name, told in results[0].items():
        assert all(result[name] == told for result in results), name
        if name != "afterwards":
            assert told is not None, name
            assert told[0] == "MismatchError", (name, told)
            assert "rank 0: " in told[1], (name, told)
    assert results[0]["afterwards"] == [count] * 3
    assert "float32 [17]" in results[0]["allreduce shape"][1]
    assert "float32 [18]" in results[0]["allreduce shape"][1]


def refusals():
    """Only rank 0 makes these calls in a way that cannot be."""
    hvd.init()
    bad = hvd.rank() == 0
    out = []
    for call in (
        lambda: hvd.alltoall(torch.ones(2), splits=[3, 0] if bad else [1, 1]),
        lambda: hvd.broadcast(torch.ones(1), 7 if bad else 0),
        lambda: hvd.reducescatter(torch.tensor(1.0) if bad else torch.ones(2)),
        lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum if bad else hvd.Sum),
    ):
        told = raised(call)
        hvd.barrier()
        out.append(told)
    return out


def test_an_invalid_call_on_one_rank_is_an_error_on_the_others_too():
    own, others = together(refusals)
    for mine, theirs in zip(own, others, strict=True):
        assert mine is not None
        assert theirs is not None
        assert theirs[0] == "MismatchError"
        assert mine[1] in theirs[1]
        assert "rank 0" in theirs[1]


def in_any_order():
    hvd.init()
    tensors = {name: torch.full((3,), float(ord(name) + hvd.rank())) for name in "abc"}
    names = "abc" if hvd.rank() else "cab"
    handles = {name: hvd.allreduce_async(tensors[name], name=name, op=hvd.Sum) for name in names}
    again = raised(lambda: hvd.allreduce_async(tensors["a"], name="a"))
    if hvd.rank() == 0:
        early = hvd.allgather_async(torch.ones(1), name="early")
    sums = [hvd.synchronize(handles[name])[0].item() for name in names[::-1]]
    hvd.barrier()
    if hvd.rank():
        early = hvd.allgather_async(torch.ones(1), name="early")
    return sorted(sums), again, early.wait().tolist(), hvd.poll(early)


def test_concurrent_collectives_match_by_name():
    for sums, again, gathered, done in together(in_any_order):
        assert sums == [2.0 * ord(name) + 1 for name in "abc"]
        assert again is not None
        assert again[0] == "UsageError"
        assert "named 'a' is under way" in again[1]
        assert gathered == [1.0, 1.0]
        assert done


def parameters():
    hvd.init()
    model = torch.nn.Linear(3 + hvd.rank(), 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    result = raised(model(torch.ones(1, 3 + hvd.rank())).sum().backward)
    optimizer.detach()
    return result


def test_optimizers_of_different_parameters_are_an_error_on_every_rank():
    first, second = together(parameters)
    assert first == second
    assert first[0] == "MismatchError"
    assert "float32 [1, 3]" in first[1]
    assert "float32 [1, 4]" in first[1]


def different_models(broadcast: bool):
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    if broadcast:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    result = raised(model(torch.ones(2, 3)).sum().backward)
    optimizer.detach()
    return result


def test_models_that_differ_before_the_first_step_are_an_error_with_a_remedy():
    for error in together(different_models, False):
        assert error is not None
        assert error[0] == "MismatchError"
        assert "1.weight has other values" in error[1]
        assert "hvd.broadcast_parameters" in error[1]
    assert together(different_models, True) == [None, None]


def failing_handles():
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(2 + hvd.rank()), name="x")
    out = [raised(handle.wait), raised(handle.wait), hvd.poll(handle)]
    part = hvd.reducescatter_async(torch.ones(2 + hvd.rank()))
    return [*out, raised(part.wait), raised(part.wait), hvd.poll(part)]


def test_a_handle_that_has_failed_fails_again():
    for first, again, done, part, part_again, part_done in together(failing_handles):
        assert first is not None
        assert first[0] == "MismatchError"
        assert again == first
        assert done
        assert part is not None
        assert part[0] == "MismatchError"
        assert part_again == part
        assert part_done


def loses_a_peer(launched):
    hvd.init()
    while hvd.rank() == 1 and not launched.exists():
        threading.Event().wait(0.001)
    handle = hvd.allreduce_async(torch.ones(1 << 23))  # it takes longer than the death
    if hvd.rank() == 1:
        die()
    launched.touch()
    errors = []
    for _ in range(2):
        try:
            handle.wait()
        except HorovodInternalError as error:
            errors.append(error)
    return len(errors) == 2 and errors[0] is errors[1], hvd.poll(handle)


def test_a_handle_whose_peer_is_gone_fails_again_and_never_gives_what_was_sent(tmp_path):
    assert together(loses_a_peer, tmp_path / "launched", left=1) == [(True, True)]


def nothing_to_send():
    hvd.init()
    empty, scalar = torch.empty(0, 3), torch.tensor(2.0)
    out = [
        hvd.allreduce(empty).shape == (0, 3),
        hvd.grouped_allreduce([empty, scalar], op=hvd.Sum)[1].item() == 2.0 * hvd.size(),
        hvd.allgather(empty).shape == (0, 3),
        hvd.allgather(scalar).tolist() == [2.0] * hvd.size(),
        hvd.grouped_allgather([empty, scalar])[0].shape == (0, 3),
        hvd.broadcast(empty, 0).shape == (0, 3),
        hvd.broadcast(scalar * hvd.rank(), 1).item() == 2.0,
        hvd.alltoall(empty).shape == (0, 3),
        hvd.alltoall(torch.empty(hvd.size(), 0)).shape == (hvd.size(), 0),
        hvd.reducescatter(empty).shape == (0, 3),
        hvd.reducescatter(torch.empty(4, 0)).shape[1] == 0,
        hvd.grouped_allgather([]) == [] and hvd.grouped_allreduce([]) == [] and hvd.grouped_reducescatter([]) == [],
        hvd.broadcast_(torch.empty(0), 0).shape == (0,),
        hvd.sparse_allreduce_async(torch.zeros(2, 2).to_sparse())().to_dense().sum().item() == 0,
    ]
    hvd.broadcast_parameters([empty, scalar], 0)
    hvd.barrier()
    return out


@pytest.mark.parametrize("hosts", by_night([(ONE_HOST,), (TWO_HOSTS,)], but=[(ONE_HOST,)]))
def test_empty_tensors_and_scalars_pass_through_every_collective(hosts):
    for checks in together(nothing_to_send, hosts=hosts):
        assert all(checks), checks


def sparse_sums():
    hvd.init()
    mine = torch.zeros(4, 2)
    mine[hvd.rank()] = 1.0
    mine[3] = 2.0
    average = hvd.synchronize(hvd.sparse_allreduce_async(mine.to_sparse(), name="x", op=hvd.Average))
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    steps = []
    for dense in (False, True):
        optimizer = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=dense)
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 2 + hvd.rank()])).sum().backward()
            optimizer.step()
            steps.append(embedding.weight.grad.coalesce().indices().flatten().tolist())
        optimizer.detach()
    return average.to_dense().tolist(), steps, hvd.allgather_object(embedding.weight.tolist())


def test_sparse_tensors_are_summed_and_sparse_optimizers_step_with_dense_reductions():
    for average, steps, weights in together(sparse_sums):
        assert average == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [2.0, 2.0]]
        assert steps == [[1, 2, 3]] * 4
        assert weights[0] == weights[1]


def test_usage_errors_are_what_horovod_raises():
    assert issubclass(UsageError, ValueError)
    assert issubclass(MismatchError, RuntimeError)

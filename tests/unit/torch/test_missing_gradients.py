"""Parameters of which some workers, or all of them, have no gradient: they are trained as in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.batch_statistics import without_rows
from spark_elastic.collective.operators import Compressor
from tests.nightly import by_night
from tests.unit.worlds import together

STEPS = 5


class Case(NamedTuple):
    """How a model with several heads is trained. `uses`: the heads that some rows use, by (step, rank, number of
    ranks); none: there is no backward pass. `zero`: how gradients are reset before each step. `passes`: backward passes
    of each step. `loose`: the results differ by rounding. `options`: more arguments of `DistributedOptimizer`.
    """

    uses: Callable[[int, int, int], str]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    zero: str = "none"
    passes: int = 1
    loose: bool = False
    sparse: bool = False
    options: Mapping[str, Any] = MappingProxyType({})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def sgd_without_decay(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def never(step: int, rank: int, size: int) -> str:
    return "a"


def not_on_rank_0_at_first(step: int, rank: int, size: int) -> str:
    return "ab" if step or rank else ""


def on_the_last_rank(step: int, rank: int, size: int) -> str:
    return "ab" if rank == size - 1 else "a"


def in_turns(step: int, rank: int, size: int) -> str:
    return ("ab" if rank == 0 else "c" if rank == 1 else "") if step % 2 else "a"


def then_nothing(step: int, rank: int, size: int) -> str:
    return "abc"[: 1 + rank] if step < 2 else ""


def each_pass_another(step: int, rank: int, size: int) -> str:
    return "abc"[(step + rank) % 2]


class Coarse(Compressor):
    """A user's compressor that leaves nothing of a 1."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor / 1e4).round(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * 1e4


PATTERNS = (never, not_on_rank_0_at_first, on_the_last_rank, in_turns, then_nothing)
CASES = [
    *(
        Case(uses, optimizer, zero)
        for uses, optimizer, zero in itertools.product(PATTERNS, (sgd, adamw), ("none", "in place"))
    ),
    *(Case(uses, sgd, options={"op": hvd.Sum}) for uses in PATTERNS),
    *(Case(uses, sgd, options={"groups": 3}) for uses in PATTERNS),
    *(Case(uses, sgd, options={"gradient_predivide_factor": 2.0}) for uses in PATTERNS),
    Case(on_the_last_rank, sgd, options={"num_groups": 2}),  # the old name of groups
    *(Case(uses, adamw, passes=2) for uses in (*PATTERNS, each_pass_another)),
    *(Case(uses, sgd, options={"compression": hvd.Compression.fp16}, loose=True) for uses in PATTERNS),
    *(Case(uses, sgd, options={"compression": hvd.Compression.bf16}, loose=True) for uses in PATTERNS),
    *(Case(uses, sgd_without_decay, sparse=True) for uses in PATTERNS),
    *(Case(uses, sgd_without_decay, sparse=True, options={"sparse_as_dense": True}) for uses in PATTERNS),
    *(Case(uses, sgd_without_decay, sparse=True, passes=2) for uses in PATTERNS),
]


class Heads(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(6, 3, sparse=sparse) if sparse else torch.nn.Linear(5, 3) for name in "abc"}
        )
        self.trunk = torch.nn.Linear(3, 2)
        self.double()

    def loss(self, names: str, step: int, rank: int) -> torch.Tensor:
        rows = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))
        inputs = rows.argsort(1)[:, 0] if isinstance(self.heads["a"], torch.nn.Embedding) else rows
        return torch.stack([self.trunk(self.heads[name](inputs)).square().sum() for name in names]).sum()


def train(case: Case, ranks: Sequence[int], size: int, divisor: float, make: Callable[[Any, Any], Any]) -> Any:
    """Return parameters and the gradients of each step, where parameters have one."""
    model = Heads(case.sparse)
    optimizer = make(case.optimizer(model.parameters()), model)
    had = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=case.zero == "none")
        for number, rank in itertools.product(range(case.passes), ranks):
            names = case.uses(step + number if case.uses is each_pass_another else step, rank, size)
            if names:
                (model.loss(names, case.passes * step + number, rank) / divisor).backward()
        optimizer.step()
        had.append([param.grad is not None for param in model.parameters()])
    return [param.detach() for param in model.parameters()], had


def distributed(case: Case) -> tuple[Any, Any]:
    """Return what this world comes to, and what one process comes to with plain torch."""
    size, is_sum = hvd.size(), case.options.get("op") is hvd.Sum
    options = {"backward_passes_per_step": case.passes, **case.options}
    found = train(case, [hvd.rank()], size, 1, lambda plain, model: hvd.DistributedOptimizer(plain, **options))
    return found, train(case, range(size), size, 1 if is_sum else size, lambda plain, model: plain)


def problems() -> list[str]:
    hvd.init()
    out = []
    for case in CASES:
        (params, had), (wanted, wanted_had) = distributed(case)
        about = case._replace(uses=case.uses.__name__, optimizer=case.optimizer.__name__)
        if had != wanted_had:
            out.append(f"{about}: gradients {had}, not {wanted_had}")
        start = Heads(case.sparse).parameters()
        for number, (param, want, begin) in enumerate(zip(params, wanted, start, strict=True)):
            exact = case.zero == "none" and torch.equal(want, begin)
            limits = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 0.03, "atol": 0.03} if case.loose else {}
            if not torch.allclose(param, want, **limits):
                out.append(f"{about}: parameter {number} {param}, not {want}")
    hvd.barrier()
    return out


def test_a_world_of_one_does_as_plain_torch(alone):
    assert problems() == []


@pytest.mark.parametrize("count", by_night([2, 3], but=[3]))
def test_parameters_without_a_gradient_are_trained_as_in_one_process(count):
    for found in together(problems, count=count):
        assert found == []


def of_own_compressor() -> list[Any]:
    hvd.init()
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), compression=Coarse, op=hvd.Sum)
    ((params[0] + (params[1] if hvd.rank() else 0)) * 1e6).sum().backward()
    optimizer.step()
    return [None if param.grad is None else param.grad.tolist() for param in params]


@pytest.mark.nightly
def test_users_compressors_do_not_touch_what_goes_with_the_gradients():
    assert together(of_own_compressor) == [[[2e6] * 2, [1e6] * 2, None]] * 2


def with_infinities() -> list[Any]:
    hvd.init()
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
    (params[0] * float("nan") + (params[1] * float("inf") if hvd.rank() else 0)).sum().backward()
    optimizer.step()
    return [None if param.grad is None else str(param.grad.tolist()) for param in params]


def test_gradients_that_are_not_finite_give_no_others_a_gradient():
    assert together(with_infinities) == [["[nan, nan]", "[inf, inf]", None]] * 2


def sparse_without_entries() -> list[Any]:
    """One rank looks up nothing, which is a gradient without entries."""
    hvd.init()
    out = []
    for looked_up in ([], [1]):
        table, other = (torch.nn.Embedding(4, 2, sparse=True) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, other.weight], lr=1.0), op=hvd.Sum)
        (table(torch.tensor([0])) + other(torch.tensor([0]))).sum().backward()  # shows which are sparse
        optimizer.step()
        optimizer.zero_grad()
        if hvd.rank():
            table(torch.tensor(looked_up, dtype=torch.int64)).sum().backward()
        optimizer.step()
        assert other.weight.grad is None
        out.append((table.weight.grad.is_sparse, table.weight.grad.coalesce().indices().tolist()))
    return out


@pytest.mark.nightly
def test_sparse_gradients_without_entries_are_gradients():
    assert together(sparse_without_entries) == [[(True, [[]]), (True, [[1]])]] * 2


def of_passes_without_rows() -> list[Any]:
    hvd.init()
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), backward_passes_per_step=2)
    for has_rows in (False, hvd.rank() == 0):
        with nullcontext() if has_rows else without_rows():
            ((params[0] + (0 if has_rows else params[1])) * (1.0 if has_rows else float("nan"))).sum().backward()
    optimizer.step()
    return [None if param.grad is None else param.grad.tolist() for param in params]


def test_passes_without_rows_leave_no_gradients():
    assert together(of_passes_without_rows) == [[[0.5, 0.5], None]] * 2


def normalised(kind: Any, ranks: Sequence[int], make: Callable[[Any], Any]) -> torch.Tensor:
    """Train a head of more than one bucket, behind batch normalisation, which rank 0 alone uses."""
    torch.manual_seed(0)
    enter, norm, head = torch.nn.Linear(3, 600), kind(600), torch.nn.Linear(600, 600)
    model = torch.nn.ModuleList([enter, norm, head]).double()
    optimizer = make(torch.optim.SGD(model.parameters(), lr=1e-5))
    for step in range(3):
        optimizer.zero_grad()
        rows = torch.cat(
            [torch.randn(4, 3, generator=torch.Generator().manual_seed(9 * step + each)) for each in ranks]
        )
        hidden = norm(enter(rows.double()))
        loss = hidden.pow(3).sum()
        if step == 0 or 0 in ranks:
            loss = loss + head(hidden if step == 0 else hidden[:4]).square().sum()
        loss.backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def with_statistics() -> bool:
    hvd.init()
    ours = normalised(hvd.SyncBatchNorm, [hvd.rank()], partial(hvd.DistributedOptimizer, op=hvd.Sum))
    theirs = normalised(torch.nn.BatchNorm1d, range(hvd.size()), lambda plain: plain)
    return torch.allclose(ours, theirs)


@pytest.mark.nightly
def test_gradients_wait_for_the_statistics_that_all_ranks_take():
    assert together(with_statistics) == [True, True]

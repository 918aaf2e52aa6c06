"""What a step reads from its device, and how it copies to it, without a GPU.

Tensors of the device "meta" have no data, so that each way to read one raises an error; a copy to the CPU is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import spark_elastic.torch as hvd
from spark_elastic.collective import group
from spark_elastic.collective.gpu.nccl import NcclReductions, NcclWork
from spark_elastic.collective.group import Group
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.reader import Batch
from spark_elastic.errors import DataError
from spark_elastic.ml.torch.engine import TorchEngine
from spark_elastic.ml.torch.objective import BatchMaker
from spark_elastic.ml.training.spec import Progress
from spark_elastic.torch.gradients import BackwardReducer
from spark_elastic.torch.stamp import Stamp
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.trainings import SumMetric, accuracy


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainings.make_sets(tmp_path_factory.mktemp("set"))


class Reads(TorchFunctionMode):
    """Counts the copies of meta tensors to the CPU, which are zeros there, and those that do not block."""

    count = 0
    queued = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and args[0].device.type == "cpu" and args[1].device.type == "meta":
            waits = not (kwargs or {}).get("non_blocking")
            self.count += waits
            self.queued += not waits
            return args[0].zero_()
        if func is torch.Tensor.cpu and args[0].device.type == "meta":
            self.count += 1
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **(kwargs or {}))


class ByClass(SumMetric):
    """The labels of each class, counted where they are."""

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.right = torch.stack([(label == number).sum() for number in range(3)])


def counting_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads, complete = Reads(), BackwardReducer.complete

    def counted(reducer: BackwardReducer) -> None:
        with reads:  # which torch leaves within backward
            complete(reducer)

    monkeypatch.setattr(BackwardReducer, "complete", counted)
    return reads


def with_counts(output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss with a denominator of its own."""
    counted = (label != 1).to(output.dtype)
    return (nn.functional.cross_entropy(output, label, reduction="none") * counted).sum(), counted.sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": with_counts, "accumulation_steps": 3, "norm": True},
        {"metrics": {"accuracy": accuracy, "by_class": ByClass()}, "gradient_clip_norm": 0.5},
    ],
    ids=["plain", "parts", "metrics"],
)
def test_a_step_reads_its_device_once_and_so_does_a_validation(
    changes: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = counting_reads(monkeypatch)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # `to` makes other parameters on this device
    training = trainings.make_training(data, tmp_path, device="meta", optimizer=sgd, **changes)
    hvd.init()
    engine = TorchEngine(training, False)
    try:
        with Dataset.open(data).reader("train", batch_size=12, prefetch=0) as reader, reads:
            batches = list(reader.epoch(0))[:3]
            for batch in batches:
                engine.step(batch, Progress(), False)
            assert reads.count == 3
            engine.begin_validation(Progress())
            engine.measure(batches)
            assert reads.count == 4
    finally:
        engine.close()
        hvd.shutdown()


def test_a_step_on_a_gpu_copies_the_next_batch_before_it_waits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    made = BatchMaker.parts

    def parts(maker: BatchMaker, batch: Batch) -> Any:
        calls.append(f"copy {batch.start}")
        return made(maker, batch)

    monkeypatch.setattr(BatchMaker, "parts", parts)
    monkeypatch.setattr(BackwardReducer, "_read_scalars", lambda reducer: calls.append("wait"))
    sgd = partial(torch.optim.SGD, lr=0.1)
    training = trainings.make_training(data, tmp_path, device="meta", optimizer=sgd)
    hvd.init()
    engine = TorchEngine(training, False)
    with Dataset.open(data).reader("train", batch_size=12, prefetch=0) as reader:
        batches = list(reader.epoch(0))[:3]

    def train(epoch: Iterator[Batch], rows: int) -> None:
        for batch in engine.ahead(epoch, rows):
            calls.append(f"step {batch.start}")
            engine.step(batch, Progress(), False)

    def epoch(error: Exception) -> Iterator[Batch]:
        yield from batches
        raise error

    with pytest.raises(DataError, match="damaged"):
        train(epoch(DataError("damaged")), reader.rows)
    expected = ["step 0", "copy 0", "copy 12", "wait", "step 12", "copy 24", "wait", "step 24", "wait"]
    assert calls == expected
    calls.clear()
    train(iter(batches), batches[-1].stop)
    assert calls == expected
    engine.close()
    hvd.shutdown()


class NcclGroup:
    """In place of a world's group whose members reduce by NCCL."""

    size, rank = 2, 0
    log = SimpleNamespace(joins=0)
    wait_each = Group.wait_each

    def __init__(self) -> None:
        self.calls: list[str] = []
        owner: Any = SimpleNamespace(check_alive=lambda: None)
        self.nccl = NcclReductions(owner, lambda: None)
        self.nccl._runtime = SimpleNamespace(mark=self._mark)  # type: ignore[assignment]

    def _mark(self, device: Any) -> Any:
        self.calls.append("mark")
        return SimpleNamespace(query=lambda: True)

    def allreduce(self, tensor: torch.Tensor, op: Any, fill: Any) -> NcclWork:
        fill(tensor, 0)
        self.calls.append("reduce")
        return NcclWork(self.nccl, SimpleNamespace(wait=lambda: self.calls.append("wait")))


def test_a_step_by_nccl_reads_nothing_and_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, world = counting_reads(monkeypatch), NcclGroup()
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 2)).to("meta")
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), op=hvd.Sum)
    reducer, agreement = optimizer._reducer, optimizer._reducer._agreement
    monkeypatch.setattr(reducer, "_present_group", lambda: world)
    monkeypatch.setattr(Stamp, "read", lambda stamp, sums: bool(sums.tolist()[0]))  # they are zeros here
    agreement.trained, agreement.unseen, agreement.reached = reducer._slots, set(), (world, 0)
    for step in range(3):
        numbers = torch.zeros(4, dtype=torch.float64, device="meta")
        sums = torch.ones(4, dtype=torch.float64)
        optimizer.zero_grad()
        optimizer.attach_scalars(numbers, sums)
        model(torch.zeros(5, 600, device="meta")).sum().backward()
        with reads:
            optimizer.step()
        assert sums.tolist() == [0.0] * 4
        assert world.calls == [*["reduce", "reduce"], *["wait", "wait"], "mark"] * (step + 1)
        assert (reads.count, reads.queued) == (0, 2 * (step + 1))


class Cuda(TorchFunctionMode):
    """Records copies to and from a GPU; tensors of float64 are said to be on one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._pinned: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            return args[0].dtype == torch.float64
        if func is torch.Tensor.to and getattr(args[1], "type", "") == "cuda":
            assert any(args[0] is each for each in self._pinned)
            self.calls.append(f"to the GPU, waits: {not kwargs['non_blocking']}")
            return args[0].clone()
        if func is torch.Tensor.copy_:
            self.calls.append(f"copy, waits: {not kwargs.get('non_blocking')}")
        if func is not torch.empty_like:
            return func(*args, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        made = func(*args, **kwargs)
        if pinned:
            self.calls.append("pinned")
            self._pinned.append(made)
        return made


def test_batches_are_copied_to_a_gpu_from_pinned_memory_without_a_wait(data: Path, tmp_path: Path) -> None:
    training = trainings.make_training(data, tmp_path)
    with Dataset.open(data).reader("train", batch_size=12, prefetch=0) as reader:
        batch = next(iter(reader.epoch(0)))
        expected = BatchMaker(training, torch.device("cpu")).parts(batch)[0]
        with Cuda() as cuda:
            part = BatchMaker(training, torch.device("cuda")).parts(batch)[0]
    assert cuda.calls == ["pinned", "copy, waits: True", "to the GPU, waits: False"] * 2
    assert torch.equal(part.inputs[0], expected.inputs[0])
    assert torch.equal(part.labels[0], expected.labels[0])


def test_tensors_on_a_gpu_go_through_pinned_memory_to_the_host_and_back() -> None:
    tensor = torch.arange(4, dtype=torch.float64)
    with Cuda() as cuda:

        def collective(copy: torch.Tensor) -> Any:
            cuda.calls.append("collective")
            copy.mul_(2)
            return SimpleNamespace(is_completed=lambda: True)

        work = group.launch_staged(collective, tensor)
        assert tensor.tolist() == [0, 1, 2, 3]
        work.copy_back()
    assert cuda.calls == ["pinned", "copy, waits: True", "collective", "copy, waits: False"]
    assert tensor.tolist() == [0, 2, 4, 6]

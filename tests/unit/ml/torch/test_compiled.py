"""`compile`, and the step that a newcomer rehearses before it joins."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import spark_elastic.torch as hvd
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.torch import train as train_module
from spark_elastic.ml.torch.rehearsal import rehearse
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.torch.train import train
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.estimators import estimator, make_net, weights_of
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver, together

CPU = torch.device("cpu")


def counted_backend(name: str) -> list[int]:
    """Register a backend that runs graphs as they are; return a list with an entry for each graph."""
    from torch._dynamo import register_backend

    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward

    register_backend(backend, name=name)
    return graphs


def test_a_compiled_model_is_trained_and_has_the_same_weights_and_names(dataset: Dataset) -> None:
    graphs = counted_backend("counted")
    plain = estimator().from_dataset_path(dataset)
    assert graphs == []
    compiled = estimator(compile="counted").from_dataset_path(dataset)
    assert graphs
    assert weights_of(compiled) == weights_of(plain)
    assert list(compiled.module.state_dict()) == list(make_net().state_dict())
    assert type(compiled.module) is nn.Sequential


def test_the_default_compiler_of_torch_gives_the_same_weights(dataset: Dataset) -> None:
    compiled = estimator(compile=True, amp="bf16").from_dataset_path(dataset)
    assert weights_of(compiled) == pytest.approx(weights_of(estimator().from_dataset_path(dataset)), abs=0.02)


def test_compile_is_true_or_the_name_of_a_backend_and_not_exact(dataset: Dataset) -> None:
    with pytest.raises(InvalidSettingsError, match="name of a backend"):
        estimator(compile="")
    with pytest.raises(InvalidSettingsError, match="compile=True may make the result depend"):
        estimator(compile=True, consistency="exact").from_dataset_path(dataset)


def test_a_killed_worker_changes_nothing_for_compiled_models(data: Path, tmp_path: Path, undisturbed: Any) -> None:
    for result in together(compiled_in_worker, data, tmp_path, count=3, left=2):
        trainings.assert_as_undisturbed(result, tmp_path, undisturbed)


def compiled_in_worker(data: Path, folder: Path) -> Any:
    from tests.unit.ml.in_worlds import At
    from tests.unit.world_link import die, link

    dies = At("on_batch_end", 17, die if link().worker == 2 else lambda: None)
    return trainings.outcome(trainings.make_training(data, folder, compile="eager", callbacks=[dies]))


# --- rehearsals -----------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A model with everything that a step changes, that remembers the rows of all its copies."""

    rows: list[int] = []  # noqa: RUF012 (of all copies)
    grads: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        self.calls += 1
        self.noise = random.random() + np.random.rand()
        out = self.layers(x)
        out.register_hook(lambda grad: self.grads.append(len(grad)))
        return out  # type: ignore[no-any-return]


def watched(dataset: Dataset, folder: Path, **changes: Any) -> TorchTraining:
    Watched.rows.clear()
    Watched.grads.clear()
    net = Watched()
    settings = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "loss": nn.CrossEntropyLoss(), "batch_size": 16}
    return TorchTraining(dataset=dataset, store=Store.create(folder), model=net, **{**settings, **changes})


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 5),
        ({"accumulation_steps": 2}, 2),
        ({"batch_size": None, "per_worker_batch_size": 7}, 7),
        ({"amp": "bf16"}, 5),
    ],
)
def test_a_rehearsal_runs_one_share_of_a_batch_and_leaves_nothing(
    changes: Any, rows: int, dataset: Dataset, tmp_path: Path
) -> None:
    training = watched(dataset, tmp_path, **changes)
    net, optimizer = training.model, training.optimizer
    before = {name: value.clone() for name, value in net.state_dict().items()}
    states, attributes = random_states(), set(vars(net))
    rehearse(training, CPU, workers=3)
    assert (Watched.rows, Watched.grads) == ([rows], [rows])
    assert random_states() == states
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(param.grad is None for param in net.parameters())
    assert not optimizer.state  # type: ignore[union-attr]
    assert set(vars(net)) == attributes


def failing(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    raise ValueError("only in a rehearsal")


def test_an_error_in_a_rehearsal_is_logged_alone(
    dataset: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    training = watched(dataset, tmp_path, loss=failing)
    states = random_states()
    rehearse(training, CPU, workers=1)
    assert "a step could not be rehearsed: ValueError: only in a rehearsal" in caplog.text
    assert random_states() == states


def told_in_worker(data: Path, folder: Path, compiler: Any) -> Any:
    """Train until there are two workers, telling of rehearsals."""

    def noted(training: TorchTraining, device: torch.device, workers: int) -> None:
        tell("rehearsed", workers)

    def until_two(run: Any) -> None:
        if run.step == 3:
            tell("trains")
        if run.size == 2:
            run.stop("enough")

    train_module.rehearse = noted  # type: ignore[attr-defined]
    callbacks = [trainings.LambdaCallback(on_batch_end=until_two)]
    train(trainings.make_training(data, folder, epochs=10_000, callbacks=callbacks, compile=compiler))
    return hvd.size()


@pytest.mark.parametrize("compiler", [False, "eager"])
def test_a_newcomer_on_a_cpu_rehearses_if_its_model_is_compiled(compiler: Any, data: Path, tmp_path: Path) -> None:
    with WorldDriver(start_with=1) as driver:
        driver.start(told_in_worker, data, tmp_path, compiler)
        driver.wait(lambda: driver.told("trains"))
        driver.start(told_in_worker, data, tmp_path, compiler)
        assert driver.results(2) == [2, 2]
    assert driver.told("rehearsed") == ([2] if compiler else [])

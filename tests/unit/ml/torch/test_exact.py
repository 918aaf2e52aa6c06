"""Trainings with consistency="exact": the same bits in every world, through kills and after a resume."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.torch.model_step import ModelStep
from spark_elastic.ml.torch.spec import MODEL_FILE
from spark_elastic.runs.checkpoints import CHECKPOINTS, Checkpoints
from spark_elastic.runs.tensors import from_bytes
from tests.nightly import by_night
from tests.unit.exact.loops import digest
from tests.unit.ml.in_worlds import Telling, kill_and_add
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.estimators import estimator, make_set
from tests.unit.world_link import tell
from tests.unit.worlds import WorldDriver, together


class Draws(Callback):
    """Sets the learning rate by chance, at all events before which other workers may have drawn other numbers."""

    def _draw(self, run: Any, logs: Any = None) -> None:
        drawn = random.random() + np.random.random() + float(torch.rand([]))
        run.optimizer.param_groups[0]["lr"] = 0.01 * (1.0 + drawn)

    on_fit_begin = on_epoch_begin = on_batch_begin = on_batch_end = _draw
    on_validation_begin = on_validation_end = on_epoch_end = _draw


CHANCE = random.Random()


class Noisy(nn.Module):
    """Adds noise of generators that are no global ones, also when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype) + 0.1 * CHANCE.random()


class Smoothed:
    """A loss that draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        smoothing = float(self.generator.uniform(0.0, 0.2))
        return nn.functional.cross_entropy(output, label, label_smoothing=smoothing)


VARIANTS: dict[str, dict[str, Any]] = {
    "dropout, batch normalisation, momentum, clipping, learning rates by chance": {
        "dropout": 0.3,
        "norm": True,
        "gradient_clip_norm": 0.1,
        "callbacks": [Draws()],
    },
    "Adam, a schedule by step, parts": {
        "dropout": 0.3,
        "optimizer": trainings.adam,
        "lr_scheduler": trainings.less_every_step,
        "scheduler_interval": "step",
        "accumulation_steps": 2,
    },
    "float32, a schedule by metric, class weights, gathered metrics": {
        "float32": True,
        "norm": True,
        "loss": nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0])),
        "lr_scheduler": trainings.plateau,
        "metrics": {"by_class": trainings.SumMetric(), "outputs": trainings.ListMetric()},
    },
    "random generators of the model and of the loss": {"noise": True, "loss": Smoothed()},
    "windows of rows, one row in some shards": {"order": "lanes", "batch_size": 67, "norm": True, "epochs": 2},
}


def make(data: Path, folder: Path, variant: str, virtual: int, **more: Any) -> Any:
    settings = {**VARIANTS[variant], **more}
    settings["callbacks"] = [*VARIANTS[variant].get("callbacks", []), *more.get("callbacks", [])]
    net = trainings.make_net(dropout=settings.pop("dropout", 0.0), norm=settings.pop("norm", False))
    if settings.pop("noise", False):
        net.append(Noisy())
        settings["generators"] = [net[-1].generator, settings["loss"].generator, CHANCE]
    if settings.pop("float32", False):
        net, data = net.float(), data.parent / "float32"
    return trainings.make_training(data, folder, model=net, virtual_workers=virtual, **settings)


def outcome(data: Path, folder: Path, variant: str, virtual: int, **more: Any) -> str:
    """The hash of the history, the weights and buffers, and of all that the last checkpoint has."""
    return digest_of(make(data, folder, variant, virtual, **more), folder)


def digest_of(training: Any, folder: Path) -> str:
    result = trainings.outcome(training)
    result = {name: each for name, each in result.items() if name not in ("size", "caused_divergence")}
    model = torch.load(folder / MODEL_FILE, weights_only=True)
    return digest(json.dumps(result, sort_keys=True, default=str), model)


def alone(*args: Any, **more: Any) -> str:
    import spark_elastic.torch as hvd

    threads = torch.get_num_threads()
    try:
        return outcome(*args, **more)
    finally:
        hvd.shutdown()
        torch.set_num_threads(threads)


def optimizer_of(folder: Path) -> str:
    """The hash of the optimizer's state in the last checkpoint."""
    checkpoints = Checkpoints(trainings.Store.create(folder).sub(CHECKPOINTS))
    found = checkpoints.load(checkpoints.latest().name)
    (file,) = found.files.values()
    return digest(from_bytes(file)["optimizer"])


@pytest.fixture(scope="module")
def sets(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    trainings.make_set(folder / "float32", float32=True)
    trainings.make_set(folder / "set")
    return folder / "set"


@pytest.mark.parametrize("variant", by_night(VARIANTS, but=list(VARIANTS)[:2]))
def test_number_of_workers_changes_no_bit(variant, sets, tmp_path):
    virtual = 5 if "windows" in variant else 4
    expected = alone(sets, tmp_path / "1", variant, virtual)
    optimizer = optimizer_of(tmp_path / "1")
    for size in (2, 4):
        folder = tmp_path / str(size)
        assert together(outcome, sets, folder, variant, virtual, count=size) == [expected] * size, f"{size} workers"
        assert optimizer_of(folder) == optimizer


def telling(data: Path, folder: Path, variant: str, virtual: int) -> str:
    return outcome(data, folder, variant, virtual, callbacks=[Telling()])


def storm(seed: int, sets: Path, folder: Path, expected: dict[tuple[str, int], str]) -> None:
    kind = list(VARIANTS)[seed % len(VARIANTS)], [2, 4, 3, 8][seed % 4]
    if kind not in expected:
        expected[kind] = alone(sets, folder / "alone", *kind)
    start = (telling, sets, folder / "killed", *kind)
    with WorldDriver(start_with=3) as driver:
        driver.start(*start, count=3)
        kill_and_add(driver, random.Random(seed), lambda: driver.start(*start))
        for result in driver.results(1):
            assert result == expected[kind], f"schedule {seed}"


@pytest.mark.parametrize("seed", by_night(range(3), but=[0]))
def test_kills_and_arrivals_change_no_bit(seed, sets, tmp_path):
    storm(seed, sets, tmp_path, {})


def slowed(data: Path, folder: Path, variant: str, virtual: int) -> str:
    """Train with virtual workers dealt by speed; the second worker takes three times as long for a row."""
    from spark_elastic.ml.torch.exact import ExactTorchEngine
    from tests.unit.world_link import link

    row_s = 6e-3 if link().worker == 2 else 2e-3
    plain_set_world = ExactTorchEngine.set_world

    def set_world(engine: Any, rank: int, size: int, shares: Any = None) -> None:
        plain_set_world(engine, rank, size, shares)
        tell("shares", shares)

    ExactTorchEngine.set_world = set_world  # type: ignore[method-assign]
    training = make(data, folder, variant, virtual, balance="auto")
    training.model.register_forward_pre_hook(lambda model, inputs: time.sleep(row_s * len(inputs[0])))
    return digest_of(training, folder)


def test_shards_that_are_dealt_by_speed_change_no_bit(sets, tmp_path):
    variant = next(iter(VARIANTS))
    expected = alone(sets, tmp_path / "1", variant, 12)
    with WorldDriver(start_with=3) as driver:
        driver.start(slowed, sets, tmp_path / "3", variant, 12, count=3)
        assert driver.results(3) == [expected] * 3
        dealt = [shares for shares in driver.told("shares") if shares]
    assert any(shares[1] < min(shares[0], shares[2]) for shares in dealt)
    assert optimizer_of(tmp_path / "3") == optimizer_of(tmp_path / "1")


# --- the estimator ------------------------------------------------------------------------------------


def test_estimator_trains_in_as_many_shards_as_it_may_have_workers(tmp_path):
    dataset = make_set(tmp_path / "set")
    made = estimator(store=str(tmp_path), consistency="exact", max_num_proc=3)
    made.from_dataset_path(dataset)
    assert made.training.virtual_workers == 3
    made = estimator(store=str(tmp_path), consistency="exact", virtual_workers=6)
    made.from_dataset_path(dataset)
    assert made.training.virtual_workers == 6
    made = estimator(store=str(tmp_path))
    made.from_dataset_path(dataset)
    assert made.training.virtual_workers is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"consistency": "off"}, "one of 'trajectory', 'exact', not 'off'"),
        ({"consistency": "exactly"}, "consistency"),
        ({"virtual_workers": 4}, "without consistency='exact'"),
        ({"generators": [random.Random()]}, "without consistency='exact'"),
        ({"consistency": "exact", "generators": random.Random()}, "must be a list"),
        ({"consistency": "exact", "generators": ["a"]}, "generators has 'a'"),
        ({"consistency": "exact", "batch_size": None, "per_worker_batch_size": 8}, "per_worker_batch_size=8"),
        ({"consistency": "exact", "gradient_compression": "fp16"}, "gradient_compression='fp16'"),
        ({"consistency": "exact", "sync_batch_norm": True}, "sync_batch_norm=True"),
        ({"consistency": "exact", "num_proc": None, "run_options": None}, "needs virtual_workers"),
    ],
)
def test_settings_that_contradict_it_are_refused(changes, said):
    with pytest.raises(InvalidSettingsError, match=said):
        estimator(**changes)._fit_run().check_settings()


class Keeping(ModelStep):
    """A model's own step, which might keep values."""

    name = "a model of its own"

    def __call__(self, model: Any, batch: Any) -> Any:
        raise AssertionError


def test_models_that_may_keep_values_between_steps_are_refused():
    with pytest.raises(InvalidSettingsError, match="cannot train a model of its own"):
        estimator(loss=None, train_fn=Keeping(), consistency="exact")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(10, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x.abs().long().clamp(max=9))


def test_sparse_gradients_are_refused_before_any_worker_starts(tmp_path):
    dataset = Dataset.open(make_set(tmp_path / "set").store.url)
    model = Words()
    made = estimator(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), store=str(tmp_path), consistency="exact"
    )
    with pytest.raises(InvalidSettingsError, match=r"gradient of words.weight is sparse"):
        made.from_dataset_path(dataset)

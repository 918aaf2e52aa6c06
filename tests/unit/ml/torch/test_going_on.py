"""Which checkpoints a fit goes on from, and which it does not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.packing import pack
from spark_elastic.errors import CheckpointError, InvalidSettingsError, StateLostError, StoreError
from spark_elastic.ml.describing import described
from spark_elastic.ml.persistence import _decode
from spark_elastic.ml.torch import safe_objects
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.torch.training import train
from tests.unit.ml.torch.estimators import HereEstimator, estimator, make_set, settings, weights_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_set(tmp_path_factory.mktemp("set"))


def sgd(rate: float) -> Any:
    return lambda params: torch.optim.SGD(params, lr=rate)


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": sgd(0.2)}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.5)}, {"batch_size": 8}],
    ids=lambda changes: next(iter(changes)),
)
def test_checkpoints_of_a_training_with_other_settings_are_refused(
    changes: dict[str, Any], dataset: Dataset, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "run_id": "a", "optimizer": sgd(0.1)}
    estimator(**common).from_dataset_path(dataset)
    with pytest.raises(CheckpointError, match=f"another training: {next(iter(changes))} was"):
        estimator(**{**common, **changes}).from_dataset_path(dataset)
    estimator(**common, verbose=0, num_threads=1).from_dataset_path(dataset)


def test_functions_are_told_apart_by_what_they_do_and_what_they_have_captured() -> None:
    assert described(sgd(0.1)) == described(sgd(0.1))
    assert described(sgd(0.1)) != described(sgd(0.2))
    assert described(lambda x: x + 1) != described(lambda x: x + 2)
    assert described([nn.Linear(2, 3)]) == described([nn.Linear(2, 3)])


class LosesItsWorkers(HereEstimator):
    """The first job ends after an epoch, with all of its workers."""

    lost = 0

    def _run_job(self, training: TorchTraining, context: Any, *events: Any) -> list[Any]:
        if self.lost == 0:
            self.lost += 1
            train(cloudpickle.loads(cloudpickle.dumps(dataclasses.replace(training, epochs=1))))
            raise StateLostError(progress=6, last_reason="killed")
        return super()._run_job(training, context, *events)


def test_a_fit_that_lost_all_workers_goes_on_from_its_checkpoint_by_itself(dataset: Dataset, tmp_path: Path) -> None:
    made = LosesItsWorkers(**settings(epochs=3, checkpoint_dir=str(tmp_path)))
    model = made.from_dataset_path(dataset)
    assert (made.lost, made.training.resume_from is None) == (1, False)
    assert weights_of(model) == weights_of(estimator(epochs=3).from_dataset_path(dataset))
    with pytest.raises(StateLostError, match="with checkpoint_dir, fit goes on"):
        LosesItsWorkers(**settings()).from_dataset_path(dataset)


@pytest.mark.parametrize("run_id", ["../evil", "/a/b", ".", "..", "", "a b"])
def test_a_run_id_is_the_name_of_a_folder_and_nothing_else(run_id: str) -> None:
    with pytest.raises(InvalidSettingsError, match="run_id must be letters"):
        estimator(run_id=run_id, checkpoint_dir="/tmp")


def test_resume_false_leaves_alone_what_is_no_run(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("years")
    estimator(checkpoint_dir=str(tmp_path), run_id="a", resume=False).from_dataset_path(dataset)
    assert (tmp_path / "a" / "thesis.txt").exists()


def test_a_checkpoint_dir_that_is_a_file_is_said_to_be_none(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        estimator(checkpoint_dir=str(tmp_path / "file"), run_id="a").from_dataset_path(dataset)


class Difference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - 10 * b) * self.weight


def test_inputs_go_by_their_numbers_whatever_their_order_in_the_set(tmp_path: Path) -> None:
    ones = np.ones(8, np.float32)
    swapped = pack({"features_1": 2 * ones, "features_0": ones, "label_0": ones}, tmp_path)
    model = estimator(model=Difference(), optimizer=torch.optim.SGD, loss=nn.MSELoss(), epochs=1).from_dataset_path(
        swapped
    )
    assert [field.name for field in model._fitted.inputs] == ["features_0", "features_1"]


@pytest.mark.parametrize("prefix", ["x", "", "Pickled", "pickled"])
def test_nothing_but_a_pickle_that_is_trusted_is_ever_unpickled(prefix: str, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "evil",)

    files = {"loss.pkl": cloudpickle.dumps({"loss": Evil()})}
    stored = {"loss": f"{prefix}:loss.pkl"}
    with pytest.raises(CheckpointError, match="running code"):
        _decode(stored, files, safe_objects, False, "path")
    if prefix != "pickled":
        with pytest.raises(CheckpointError, match="damaged"):
            _decode(stored, files, safe_objects, True, "path")
    assert not (tmp_path / "evil").exists()

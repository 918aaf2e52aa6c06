"""The checkpoints that a fit with the same run_id resumes from, and those that it refuses."""

from __future__ import annotations

import dataclasses
import os
import pickle
import time
import uuid
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from spark_elastic.data.catalog import is_leased
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, LossNotFiniteError, RunTakenError, StateLostError, StoreError
from spark_elastic.ml.callbacks import LambdaCallback
from spark_elastic.ml.run_folder import collect_runs, transient_run
from spark_elastic.ml.saved_stage import _decode
from spark_elastic.ml.torch import serialization
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.torch.train import train
from spark_elastic.runs.checkpoints import Checkpoints
from spark_elastic.runs.lease import OWNERS, Owner, ProcessIdentity
from spark_elastic.wire.pickling import round_trip
from tests.unit.ml.torch.estimators import HereEstimator, estimator, make_set, settings, weights_of
from tests.unit.ml.torch.trainings import NanFrom


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


def test_fit_with_nan_loss_fails_with_advice_and_keeps_its_checkpoints(dataset: Dataset, tmp_path: Path) -> None:
    common: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "run_id": "a", "epochs": 3}
    said = r"the loss of step 14 is nan .*epoch 3, .*rank 0.*allow_nan_loss=True"
    with pytest.raises(LossNotFiniteError, match=said) as caught:
        estimator(**common, loss=NanFrom(14 + 2 * 2)).from_dataset_path(dataset)
    error = caught.value
    assert (error.step, error.epoch, error.ranks, error.size) == (14, 2, (0,), 1)
    assert error.checkpoints in pickle.loads(pickle.dumps(error)).message
    latest = Checkpoints(Store.create(tmp_path / "a" / "checkpoints")).latest()
    assert latest is not None
    assert latest.step == 12
    loss = NanFrom(14 + 2 * 2)
    assert len(estimator(loss=loss, epochs=3, allow_nan_loss=True).from_dataset_path(dataset).history) == 3


def test_rows_in_another_order_or_with_other_text_are_other_rows(dataset: Dataset, tmp_path: Path) -> None:
    common: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "run_id": "a", "optimizer": sgd(0.1)}
    estimator(**common).from_dataset_path(dataset)
    first, second = dataset.manifest.splits["train"]
    swapped = {**dataset.manifest.splits, "train": (second, first)}
    texts = {**dataset.manifest.splits, "train": (first, dataclasses.replace(second, sidecar_crc32=7))}
    for splits in (swapped, texts):
        other = Dataset(dataset.store, dataclasses.replace(dataset.manifest, splits=splits))
        with pytest.raises(CheckpointError, match=r"checkpoints of other rows.*in their order.*resume=False"):
            estimator(**common).from_dataset_path(other)
    estimator(**common, epochs=3).from_dataset_path(dataset)


class LosesItsWorkers(HereEstimator):
    """The first job ends after an epoch, with all of its workers."""

    lost = 0

    def run_job(self, training: TorchTraining) -> list[Any]:
        if self.lost == 0:
            self.lost += 1
            train(round_trip(dataclasses.replace(training, epochs=1)))
            raise StateLostError(progress=6, last_reason="killed")
        return super().run_job(training)


def test_fit_that_lost_all_workers_resumes_from_its_checkpoint(dataset: Dataset, tmp_path: Path) -> None:
    made = LosesItsWorkers(**settings(epochs=3, checkpoint_dir=str(tmp_path)))
    model = made.from_dataset_path(dataset)
    assert (made.lost, made.training.resume_from is None) == (1, False)
    assert weights_of(model) == weights_of(estimator(epochs=3).from_dataset_path(dataset))
    with pytest.raises(StateLostError, match="with checkpoint_dir, fit resumes"):
        LosesItsWorkers(**settings()).from_dataset_path(dataset)


def test_damaged_checkpoints_are_an_error_and_are_kept(dataset: Dataset, tmp_path: Path) -> None:
    common: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "run_id": "a", "epochs": 1}
    estimator(**common).from_dataset_path(dataset)
    (state,) = (tmp_path / "a").glob("checkpoints/*/state.pt")
    damaged = state.read_bytes()[:-1]
    state.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints.*state\.pt is not what was written"):
        estimator(**common).from_dataset_path(dataset)
    assert state.read_bytes() == damaged
    (tmp_path / "a" / "run.json").unlink()  # as by one that was killed while it deleted the old run
    estimator(**common, resume=False).from_dataset_path(dataset)


@pytest.mark.parametrize("text", [b"{", b"\xff"])
def test_damaged_description_of_a_run_is_reported(text: bytes, dataset: Dataset, tmp_path: Path) -> None:
    common: dict[str, Any] = {"checkpoint_dir": str(tmp_path), "run_id": "a", "epochs": 1}
    estimator(**common).from_dataset_path(dataset)
    (tmp_path / "a" / "run.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"a/run\.json.* is damaged.*resume=False"):
        estimator(**common).from_dataset_path(dataset)


def test_run_taken_over_by_another_driver_is_left_to_it(dataset: Dataset, tmp_path: Path) -> None:
    run = Store.create(tmp_path / "a")

    def take_over(view: Any, row: Any) -> None:
        if view.epoch == 0:
            [own] = run.list(OWNERS)
            token = int(own.path.rpartition("/")[2].partition("-")[0]) + 1
            elsewhere = ProcessIdentity("host-b", "host-b:boot", 42, 1, "train.py")
            other = Owner(token, f"{token:06d}-{'f' * 32}.json", elsewhere, 1.0, 0, 1.0)
            run.write_bytes(f"{OWNERS}/{other.name}", other.dumps())

    changes: dict[str, Any] = {"epochs": 3, "callbacks": [LambdaCallback(on_epoch_end=take_over)]}
    with pytest.raises(RunTakenError, match="taken over by the driver with pid 42 on host-b"):
        estimator(**changes, checkpoint_dir=str(tmp_path), run_id="a").from_dataset_path(dataset)
    assert not run.exists("model.pt")
    assert [entry.path for entry in run.list("checkpoints")] == []


def test_model_that_cannot_be_written_is_returned_with_the_results(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_SAVE_TIMEOUT", "0")
    (tmp_path / "a" / "model.pt" / "in the way").mkdir(parents=True)
    model = estimator(checkpoint_dir=str(tmp_path), run_id="a").from_dataset_path(dataset)
    assert weights_of(model) == weights_of(estimator().from_dataset_path(dataset))
    assert f"model.pt could not be written to {tmp_path / 'a'} and came with the results" in caplog.text


def test_checkpoint_dir_that_is_a_file_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        estimator(checkpoint_dir=str(tmp_path / "file"), run_id="a").from_dataset_path(dataset)


def test_resume_false_keeps_folders_that_are_not_runs(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("years")
    estimator(checkpoint_dir=str(tmp_path), run_id="a", resume=False).from_dataset_path(dataset)
    assert (tmp_path / "a" / "thesis.txt").exists()


@pytest.mark.parametrize("prefix", ["x", "", "Pickled", "pickled"])
def test_only_trusted_pickles_are_unpickled(prefix: str, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "evil",)

    files = {"loss.pkl": cloudpickle.dumps({"loss": Evil()})}
    stored = {"loss": f"{prefix}:loss.pkl"}
    with pytest.raises(CheckpointError, match="running code"):
        _decode(stored, files, serialization, False, "path")
    if prefix != "pickled":
        with pytest.raises(CheckpointError, match="damaged"):
            _decode(stored, files, serialization, True, "path")
    assert not (tmp_path / "evil").exists()


# --- folders of trainings, datasets that are in use ---------------------------------------------------


DAY = 86_400.0


def by_lr(lr: float) -> Any:
    return lambda params: torch.optim.SGD(params, lr=lr)


def test_each_param_map_is_a_separate_training(tmp_path: Path) -> None:
    dataset = make_set(tmp_path / "set")
    made = estimator(optimizer=by_lr(0.1), epochs=2, checkpoint_dir=tmp_path / "runs", run_id="a")
    made._shared_datasets = object()  # as within fitMultiple
    maps = ({made.epochs: 2}, {made.epochs: 1}, {made.optimizer: by_lr(0.5)})
    models = [made.from_dataset_path(dataset, params) for params in maps]
    assert [len(model.history) for model in models] == [2, 1, 2]
    assert weights_of(models[0]) != weights_of(models[2])
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_runs_of_processes_that_died_are_removed_once_they_are_old(tmp_path: Path) -> None:
    runs = Store.create(tmp_path)
    old, young, strange = (uuid.uuid4().hex for _ in range(3))
    for name in (f"{old}/checkpoints/1/state.pt", f"{young}/model.pt", f"{strange}/thesis.tex", "named/model.pt"):
        runs.write_bytes(name, b"x")
    with transient_run(runs) as running:
        for path in tmp_path.rglob("*"):
            if young not in str(path):
                os.utime(path, (time.time() - 2 * DAY,) * 2)
        assert collect_runs(runs) == [old]
        assert running.exists()
    assert not running.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([young, strange, "named"])


def test_existing_dataset_is_leased_during_a_fit(tmp_path: Path) -> None:
    dataset = make_set(tmp_path)

    def leased_now(optimizer: Any) -> Any:
        assert is_leased(Store.create(tmp_path))
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    estimator(lr_scheduler=leased_now, epochs=1).from_dataset_path(dataset)
    assert not is_leased(Store.create(tmp_path))
    assert not list((tmp_path / "leases").iterdir())
    (tmp_path / "leases").rmdir()
    (tmp_path / "leases").write_text("a file where the folder of the leases would be")  # as on read-only storage
    assert len(estimator(epochs=1).from_dataset_path(dataset).history) == 1

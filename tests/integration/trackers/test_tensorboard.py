"""Fits that are written for TensorBoard, read with TensorBoard's own reader."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from spark_elastic import TensorBoardCallback
from spark_elastic.data.dataset import Dataset
from tests.integration.local.driver_fits import At, Killing, Pids, estimator


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = EventAccumulator(str(folder))
    made.Reload()
    return made


def test_fit_with_a_kill_has_curves_workers_and_events(rows: Dataset, tmp_path: Path) -> None:
    callback = TensorBoardCallback(tmp_path / "logs", run_name="stormy")
    model = estimator(Pids(tmp_path), Killing(tmp_path, (1,)), callback, num_proc=3).from_dataset_path(rows)
    found = read(tmp_path / "logs" / "stormy")
    loss = [(each.step, each.value) for each in found.Scalars("loss/train")]
    assert loss == [(epoch, pytest.approx(value)) for epoch, value in enumerate(model.history["loss"])]
    assert [each.step for each in found.Scalars("loss/validation")] == [0, 1, 2, 3]
    assert {3.0, 2.0} <= {each.value for each in found.Scalars("workers")}
    texts = [each.tensor_proto.string_val[0].decode() for each in found.Tensors("events/text_summary")]
    assert texts[0] == "training starts with 3 workers"
    assert [text for text in texts if "killed by signal 9" in text]
    (settings,) = found.Tensors("settings/text_summary")
    assert b"| batch_size | 16 |" in settings.tensor_proto.string_val[0]


@pytest.mark.nightly
def test_folder_that_disappears_costs_a_warning_and_not_the_fit(rows: Dataset, tmp_path: Path, caplog: Any) -> None:
    logs = tmp_path / "logs"
    callback = TensorBoardCallback(logs)

    def take_away() -> None:
        shutil.rmtree(logs)
        callback._fits()[-1]._writer.close()
        logs.touch()

    model = estimator(At(1, take_away), callback, num_proc=1).from_dataset_path(rows)
    assert len(model.history) == 4
    assert len([each for each in caplog.records if each.name == "spark_elastic.tensorboard"]) == 1

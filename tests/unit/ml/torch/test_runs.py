"""Each training has its own folder: others keep it while it runs, and remove it when its driver has died."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from spark_elastic.data.catalog import is_leased
from spark_elastic.data.store import Store
from spark_elastic.ml.run_folder import collect_runs, transient_run
from tests.unit.ml.torch.estimators import estimator, make_set, weights_of

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

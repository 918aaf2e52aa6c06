"""That the training's folder has room is looked at before the first epoch."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.ml.run_folder import check_room, checkpoints_at_once
from spark_elastic.ml.training.spec import CheckpointPlan


def training(plan=None, epochs=10):
    return SimpleNamespace(checkpoints=plan, epochs=epochs)


def test_a_model_that_does_not_fit_the_disk_is_refused_with_the_numbers(tmp_path):
    run = Store.create(tmp_path / "not" / "there yet")
    free = shutil.disk_usage(tmp_path).free
    check_room(run, free // 4, training())
    with pytest.raises(StoreError, match=r"GiB free.*at least .*GiB.*give another store"):
        check_room(run, 2 * free, training())


def test_checkpoints_count_as_often_as_they_are_kept(tmp_path):
    run = Store.create(tmp_path)
    free = shutil.disk_usage(tmp_path).free
    check_room(run, free // 4, training(CheckpointPlan(keep=1), epochs=1))
    with pytest.raises(StoreError, match=r"and 6 checkpoints of at least as much.*lower keep_checkpoints"):
        check_room(run, free // 4, training(CheckpointPlan(keep=5)))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (CheckpointPlan(keep=3), 4),
        (CheckpointPlan(keep=3, best_of="loss"), 5),
        (CheckpointPlan(keep=30), 10),
        (CheckpointPlan(keep=30, every_epochs=4), 3),
        (CheckpointPlan(keep=30, every_seconds=5.0), 31),
        (CheckpointPlan(every_epochs=None), 0),
    ],
)
def test_how_many_lie_there_at_a_time(plan, expected):
    assert checkpoints_at_once(plan, epochs=10) == expected


def test_a_remote_store_is_not_asked():
    check_room(Store.create("memory://room"), 1 << 60, training())

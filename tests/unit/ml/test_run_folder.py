"""A training is refused before its first epoch when its folder has too little room."""

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


def test_model_larger_than_the_free_disk_is_refused_with_the_numbers(tmp_path):
    run = Store.create(tmp_path / "not" / "there yet")
    free = shutil.disk_usage(tmp_path).free
    check_room(run, free // 4, training())
    with pytest.raises(StoreError, match=r"GiB free.*at least .*GiB.*give another store"):
        check_room(run, 2 * free, training())


def test_room_for_each_kept_checkpoint_is_needed(tmp_path):
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
def test_largest_number_of_checkpoints_at_once(plan, expected):
    assert checkpoints_at_once(plan, epochs=10) == expected


def test_room_of_a_remote_store_is_not_checked():
    check_room(Store.create("memory://room"), 1 << 60, training())

"""A training is refused before its first epoch when its folder has too little room."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from spark_elastic.data.catalog import delete_unless_used, mark_used
from spark_elastic.data.dataset import pack
from spark_elastic.data.store import Store
from spark_elastic.errors import StoreError
from spark_elastic.ml.datasets import SharedDatasets
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


# --- datasets of fits ---------------------------------------------------------------------------------


class Away:
    """A store that answers nothing, with an error of its own package."""

    url = "s3://away/set"

    def __getattr__(self, name):
        raise RuntimeError("HTTP 503")


def test_unreachable_store_is_logged_and_raises_nothing(caplog):
    delete_unless_used(Away())
    assert "s3://away/set could not be deleted: HTTP 503" in caplog.text


@pytest.mark.parametrize("keep", [False, True])
def test_fits_of_one_call_share_rows_until_the_last_is_done(tmp_path, keep):
    shared, written = SharedDatasets(fits=3), []

    def write():
        written.append(pack({"x": np.arange(3)}, Store.create(tmp_path / str(len(written)))))
        mark_used(written[-1].store, keep)
        return written[-1]

    found = []
    for settings in ("a", "b", "a"):
        found.append(shared.get(settings, write))
        assert all(each.store.exists() for each in found)
        shared.done()
    assert found == [written[0], written[1], written[0]]
    assert [each.store.exists() for each in written] == [keep, keep]

"""The same training in worlds that differ, grow and break: real processes, real kills, one result."""

from __future__ import annotations

import pytest

from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.trainings import EPOCHS, ROWS, STEPS, in_worker
from tests.unit.torch.kit import KitDriver

STEPS_AN_EPOCH = STEPS // EPOCHS


def close(expected):
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


def assert_as_undisturbed(result, folder, undisturbed):
    expected, weights = undisturbed
    assert result["steps"] == expected["steps"] == STEPS
    assert len(result["history"]) == EPOCHS
    for row, wanted in zip(result["history"], expected["history"], strict=True):
        assert row == close(wanted)
        assert row["rows"] == ROWS
    assert trainings.weights(folder) == close(weights)


def test_every_row_counts_once_in_training_and_in_validation(undisturbed, data):
    from spark_elastic.data.dataset import Dataset

    dataset = Dataset.open(data)
    labels = {split: next(dataset.reader(split, batch_size=1000).epoch(0))["label_0"] for split in dataset.splits}
    for row in undisturbed[0]["history"]:
        assert row["label_sum"] == close(labels["train"].mean())
        assert row["val_label_sum"] == close(labels["validation"].mean())


@pytest.mark.parametrize("size", [2, 3])
def test_the_number_of_workers_changes_nothing(size, data, tmp_path, undisturbed):
    with KitDriver(start_with=size) as driver:
        driver.start(in_worker, data, tmp_path, {}, {}, count=size)
        for result in driver.results(size):
            assert result["size"] == size
            assert_as_undisturbed(result, tmp_path, undisturbed)


KILLS = {
    "in the forward pass": ("forward", 7),
    "in the backward pass": ("backward", STEPS_AN_EPOCH + 2),
    "after a step": ("on_batch_end", 5),
    "after the last step of an epoch": ("on_batch_end", STEPS_AN_EPOCH),
    "in a validation": ("forward", STEPS_AN_EPOCH + 2),
    "when the validation has ended": ("on_validation_end", 1),
    "at the end of an epoch": ("on_epoch_end", 2),
    "at the beginning of an epoch": ("on_epoch_begin", 2),
    "after the last step": ("on_batch_end", STEPS),
    "at the end": ("on_fit_end", 1),
}


@pytest.mark.parametrize("victim", [1, 3], ids=["rank 0", "the last rank"])
@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS.keys())
def test_a_worker_that_is_killed_changes_nothing(kill, victim, data, tmp_path, undisturbed):
    with KitDriver(start_with=3) as driver:
        driver.start(in_worker, data, tmp_path, {victim: kill}, {}, count=3)
        for result in driver.results(2):
            assert_as_undisturbed(result, tmp_path, undisturbed)
        assert len(driver.worlds) >= 2


@pytest.mark.parametrize("half", [True, False], ids=["half written", "written"])
@pytest.mark.parametrize("file", ["state.pt", "checkpoint.json", "model.pt", "history.json"])
def test_rank_0_that_is_killed_while_it_writes_changes_nothing(file, half, data, tmp_path, undisturbed):
    with KitDriver(start_with=2) as driver:
        driver.start(in_worker, data, tmp_path, {1: ("store", file, half)}, {}, count=2)
        (result,) = driver.results(1)
        assert_as_undisturbed(result, tmp_path, undisturbed)

"""The same training in worlds that differ, grow and break: real processes, real kills, one result."""

from __future__ import annotations

import itertools
import random

import pytest

from spark_elastic.data.dataset import Dataset
from tests.unit.ml.in_worlds import EPOCHS, STEPS, STEPS_AN_EPOCH, close, kill_and_add
from tests.unit.worlds import WorldDriver, together

FIRST, LAST = 1, 3
"""The workers that have rank 0 and the last rank at the start."""
TORCH_KILLS = {
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
KERAS_KILLS = {
    "in the first step": (FIRST, ("before a reduction", 1)),
    "in the forward or backward pass": (LAST, ("before a reduction", 7)),
    "when the step has been reduced": (FIRST, ("after a reduction", 5)),
    "after the last step of an epoch": (FIRST, ("on_batch_end", STEPS_AN_EPOCH)),
    "before a validation": (FIRST, ("before buffers are shared", 2)),
    "in a validation": (LAST, ("in a validation", 2)),
    "at the end": (FIRST, ("on_fit_end", 1)),
    "while the model is written": (FIRST, ("while the model is written", 1)),
}
KILLS = [
    *(
        pytest.param("torch", victim, kill, id=f"torch-{moment}-worker {victim}")
        for (moment, kill), victim in zip(TORCH_KILLS.items(), itertools.cycle((FIRST, LAST)))
    ),
    *(pytest.param("keras", *kill, id=f"keras-{moment}") for moment, kill in KERAS_KILLS.items()),
]


def test_every_row_counts_once_in_training_and_in_validation(framework, undisturbed, data):
    path, total = (data, "mean") if framework.name == "torch" else (data / "plain", "sum")
    dataset = Dataset.open(path)
    labels = {split: next(dataset.reader(split, batch_size=1000).epoch(0))["label_0"] for split in dataset.splits}
    for row in undisturbed[0]["history"]:
        assert row["label_sum"] == close(getattr(labels["train"], total)())
        assert row["val_label_sum"] == close(getattr(labels["validation"], total)())


@pytest.mark.parametrize("size", [2, 3])
def test_number_of_workers_changes_nothing(framework, size, data, tmp_path, undisturbed):
    for result in together(framework.trainings.in_worker, data, tmp_path, {}, count=size):
        assert result["size"] == size
        framework.trainings.assert_as_undisturbed(result, tmp_path, undisturbed)


@pytest.mark.parametrize(("framework", "victim", "kill"), KILLS, indirect=["framework"])
def test_killed_worker_changes_nothing(framework, victim, kill, data, tmp_path, undisturbed):
    with WorldDriver(start_with=3) as driver:
        driver.start(framework.trainings.in_worker, data, tmp_path, {victim: kill}, count=3)
        for result in driver.results(2):
            framework.trainings.assert_as_undisturbed(result, tmp_path, undisturbed)
        assert len(driver.worlds) >= 2


def test_new_workers_take_over_the_state_and_change_nothing(framework, data, tmp_path, undisturbed):
    start = (framework.trainings.in_worker_slowly, data, tmp_path)
    with WorldDriver(start_with=1) as driver:
        driver.start(*start)
        driver.wait(lambda: driver.told("step"))
        driver.start(*start, count=2)
        results = driver.results(3)
        assert max(world.size for world in driver.worlds) > 1
        for result in results:
            assert result["epochs counted"] == EPOCHS
            framework.trainings.assert_as_undisturbed(result, tmp_path, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_kills_and_arrivals_at_any_moment_change_nothing(framework, seed, data, tmp_path, undisturbed):
    start = (framework.trainings.in_worker_that_tells, data, tmp_path)
    with WorldDriver(start_with=3) as driver:
        driver.start(*start, count=3)
        kill_and_add(driver, random.Random(seed), lambda: driver.start(*start))
        for result in driver.results(1):
            framework.trainings.assert_as_undisturbed(result, tmp_path, undisturbed)

"""The same training of a Keras model in worlds that differ, grow and break: real processes, real kills, one result."""

from __future__ import annotations

import random

import pytest

from spark_elastic.data.dataset import Dataset
from tests.unit.ml.in_worlds import kill_and_add
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import EPOCHS, ROWS, STEPS, in_worker, in_worker_slowly, in_worker_variants
from tests.unit.worlds import WorldDriver

STEPS_AN_EPOCH = STEPS // EPOCHS
VARIANTS = list(trainings.VARIANTS)


def close(expected):
    return pytest.approx(expected, rel=1e-9, abs=1e-11)


def assert_as_undisturbed(result, folder, undisturbed):
    expected, weights = undisturbed
    assert result["steps"] == expected["steps"]
    for row, wanted in zip(result["history"], expected["history"], strict=True):
        assert row == close(wanted)
        assert row["rows"] == ROWS
    assert trainings.weights(folder) == close(weights)


def test_every_row_counts_once_in_training_and_in_validation(undisturbed, data):
    dataset = Dataset.open(data / "plain")
    labels = {split: next(dataset.reader(split, batch_size=1000).epoch(0))["label_0"] for split in dataset.splits}
    for row in undisturbed[0]["history"]:
        assert row["label_sum"] == labels["train"].sum()
        assert row["val_label_sum"] == labels["validation"].sum()


@pytest.mark.parametrize("size", [2, 3])
def test_the_number_of_workers_changes_nothing(size, data, tmp_path, undisturbed):
    with WorldDriver(start_with=size) as driver:
        driver.start(in_worker, data, tmp_path, {}, count=size)
        for result in driver.results(size):
            assert result["size"] == size
            assert_as_undisturbed(result, tmp_path, undisturbed)


@pytest.fixture(scope="module")
def in_three(data, tmp_path_factory):
    """What the variants come to in a world of three, by name, of each worker."""
    folder, results = tmp_path_factory.mktemp("three"), [{}, {}, {}]
    for names in (VARIANTS[::3], VARIANTS[1::3], VARIANTS[2::3]):
        with WorldDriver(start_with=3) as driver:
            driver.start(in_worker_variants, data, folder, names, count=3)
            for known, new in zip(results, driver.results(3), strict=True):
                known |= new
    return results, folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_setting_makes_the_result_depend_on_the_number_of_workers(variant, data, tmp_path, undisturbed, in_three):
    changes = trainings.variant_of(variant)
    expected = trainings.alone(trainings.make_training(data, tmp_path, **changes)), trainings.weights(tmp_path)
    results, folder = in_three
    if variant == "divided by sample weights":  # a mean over those of each worker's rows, in a validation
        for each in (expected[0], *(result[variant] for result in results)):
            for row in each["history"]:
                row["val_loss"] = round(row["val_loss"], 1)
    for result in results:
        assert_as_undisturbed(result[variant], folder / variant, expected)
    assert (expected[1] == close(undisturbed[1])) == (variant == "a train_step of one's own"), "settings do something"


KILLS = {
    "in the first step": (1, ("before a reduction", 1)),
    "in the forward or backward pass": (3, ("before a reduction", 7)),
    "when the step has been reduced": (1, ("after a reduction", 5)),
    "after a step": (3, ("on_batch_end", 5)),
    "after the last step of an epoch": (1, ("on_batch_end", STEPS_AN_EPOCH)),
    "before a validation": (1, ("when all are to have one's buffers", 2)),
    "in a validation": (3, ("in a validation", 2)),
    "at the end of an epoch": (1, ("on_epoch_end", 2)),
    "at the beginning of an epoch": (3, ("on_epoch_begin", 2)),
    "at the end": (1, ("on_fit_end", 1)),
    "while the model is written": (1, ("while the model is written", 1)),
}


@pytest.mark.parametrize(("victim", "kill"), KILLS.values(), ids=KILLS.keys())
def test_a_worker_that_is_killed_changes_nothing(victim, kill, data, tmp_path, undisturbed):
    with WorldDriver(start_with=3) as driver:
        driver.start(in_worker, data, tmp_path, {victim: kill}, count=3)
        for result in driver.results(2):
            assert_as_undisturbed(result, tmp_path, undisturbed)
        assert len(driver.worlds) >= 2


@pytest.mark.parametrize("count", [9, 10], ids=["forward", "backward"])
def test_a_worker_that_is_killed_within_batch_normalisation_changes_nothing(count, data, tmp_path):
    with trainings.in_float64():
        net = trainings.make_net(norm=True)
    single = trainings.make_training(data, tmp_path / "alone", model=net)
    expected = trainings.alone(single), trainings.weights(tmp_path / "alone")
    with WorldDriver(start_with=3) as driver:
        plan = {3: ("in a layer's reduction", count)}
        driver.start(in_worker, data, tmp_path / "three", plan, {"norm": True}, count=3)
        for result in driver.results(2):
            assert_as_undisturbed(result, tmp_path / "three", expected)
        assert len(driver.worlds) >= 2


def test_newcomers_take_over_everything_and_change_nothing(data, tmp_path, undisturbed):
    with WorldDriver(start_with=1) as driver:
        driver.start(in_worker_slowly, data, tmp_path)
        driver.wait(lambda: driver.told("step"))
        driver.start(in_worker_slowly, data, tmp_path, count=2)
        results = driver.results(3)
        assert max(world.size for world in driver.worlds) > 1
        for result in results:
            assert result["epochs counted"] == EPOCHS
            assert_as_undisturbed(result, tmp_path, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_kills_and_arrivals_at_any_moment_change_nothing(seed, data, tmp_path, undisturbed):
    start = (trainings.in_worker_that_tells, data, tmp_path)
    with WorldDriver(start_with=3) as driver:
        driver.start(*start, count=3)
        kill_and_add(driver, random.Random(seed), lambda: driver.start(*start))
        for result in driver.results(1):
            assert_as_undisturbed(result, tmp_path, undisturbed)

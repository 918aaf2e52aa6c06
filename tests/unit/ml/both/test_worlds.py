"""The same training in worlds that differ, grow and break: real processes, real kills, one result."""

import itertools
import random

import pytest

from spark_elastic.data.dataset import Dataset
from tests.nightly import by_night
from tests.unit.ml.in_worlds import BATCH, EPOCHS, LONG, STEPS_AN_EPOCH, close, in_worker_with_shares, kill_and_add
from tests.unit.worlds import WorldDriver, together

FIRST, LAST = 1, 3
"""The workers that have rank 0 and the last rank at the start."""
TORCH_KILLS = {
    "in the forward pass": ("forward", 7),
    "in the backward pass": ("backward", STEPS_AN_EPOCH + 2),
    "after the last step of an epoch": ("on_batch_end", STEPS_AN_EPOCH),
    "in a validation": ("forward", STEPS_AN_EPOCH + 2),
    "at the end of an epoch": ("on_epoch_end", 2),
    "at the end": ("on_fit_end", 1),
}
KERAS_KILLS = {
    "in the first step": (FIRST, ("before a reduction", 1)),
    "when the step has been reduced": (FIRST, ("after a reduction", 5)),
    "after the last step of an epoch": (FIRST, ("on_batch_end", STEPS_AN_EPOCH)),
    "in a validation": (LAST, ("in a validation", 2)),
    "while the model is written": (FIRST, ("while the model is written", 1)),
}
BY_DAY = {"in the backward pass", "when the step has been reduced"}


def kill_of(framework, victim, kill, moment):
    marks = [] if moment in BY_DAY else pytest.mark.nightly
    return pytest.param(framework, victim, kill, id=f"{framework}-{moment}-worker {victim}", marks=marks)


KILLS = [
    *(
        kill_of("torch", victim, kill, moment)
        for (moment, kill), victim in zip(TORCH_KILLS.items(), itertools.cycle((FIRST, LAST)))
    ),
    *(kill_of("keras", victim, kill, moment) for moment, (victim, kill) in KERAS_KILLS.items()),
]


def test_every_row_counts_once_in_training_and_in_validation(framework, undisturbed, data):
    path, total = (data, "mean") if framework.name == "torch" else (data / "plain", "sum")
    dataset = Dataset.open(path)
    labels = {split: next(dataset.reader(split, batch_size=1000).epoch(0))["label_0"] for split in dataset.splits}
    for row in undisturbed[0]["history"]:
        assert row["label_sum"] == close(getattr(labels["train"], total)())
        assert row["val_label_sum"] == close(getattr(labels["validation"], total)())


def test_number_of_workers_changes_nothing(framework, data, tmp_path, undisturbed):
    for result in together(framework.trainings.in_worker, data, tmp_path, {}, count=3):
        assert result["size"] == 3
        framework.trainings.assert_as_undisturbed(result, tmp_path, undisturbed)


@pytest.mark.parametrize(("framework", "victim", "kill"), KILLS, indirect=["framework"])
def test_killed_worker_changes_nothing(framework, victim, kill, data, tmp_path, undisturbed):
    with WorldDriver(start_with=3) as driver:
        driver.start(framework.trainings.in_worker, data, tmp_path, {victim: kill}, count=3)
        for result in driver.results(2):
            framework.trainings.assert_as_undisturbed(result, tmp_path, undisturbed)
        assert len(driver.worlds) >= 2


@pytest.mark.parametrize("framework", by_night(["torch", "keras"], but=["torch"]), indirect=True)
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


# --- shares by speed --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def long_undisturbed(framework, data, tmp_path_factory):
    """The outcome and weights of a longer training in a world of one, with equal shares."""
    folder, trainings = tmp_path_factory.mktemp(f"{framework.name}-long"), framework.trainings
    return trainings.alone(trainings.make_training(data, folder, epochs=LONG)), trainings.weights(folder)


SHARED = [
    *(
        ("torch", name)
        for name in (None, "accumulation", "batch normalisation", "metrics with states", "class weights")
    ),
    ("torch", "rare sparse gradients"),
    ("torch", "rows in windows, in parts"),
    *(("keras", name) for name in (None, "two outputs", "parts, bounds and another seed", "divided by sample weights")),
]
"""Trainings whose results must not depend on the shares."""


@pytest.mark.parametrize(
    ("framework", "variant"), by_night(SHARED, but=[("torch", "batch normalisation")]), indirect=["framework"]
)
def test_slow_worker_takes_fewer_rows_and_changes_nothing(framework, variant, data, tmp_path):
    trainings = framework.trainings
    changes = {} if variant is None else trainings.variant_of(variant)
    alone = trainings.make_training(data, tmp_path / "alone", epochs=LONG, **changes)
    expected = trainings.alone(alone), trainings.weights(tmp_path / "alone")
    results = together(in_worker_with_shares, framework.name, data, tmp_path / "three", variant, count=3)
    for result in results:
        trainings.assert_as_undisturbed(result, tmp_path / "three", expected)
        assert result["shares"] == results[0]["shares"]
        assert result["work"] == results[0]["work"], "else a state counts as another after a loss"
    assert results[0]["shares"][0] is None
    assert any(each[0] < min(each[1:]) for each in results[0]["shares"] if each)


def test_worker_without_memory_for_more_rows_takes_no_more_than_an_equal_share(
    framework, data, tmp_path, long_undisturbed
):
    equal = BATCH // 3
    for result in together(in_worker_with_shares, framework.name, data, tmp_path, None, equal, count=3):
        framework.trainings.assert_as_undisturbed(result, tmp_path, long_undisturbed)
        shares = result["shares"]
        tried = next(at for at, each in enumerate(shares) if each and each[1] > equal)
        assert shares[tried + 1] is None, "a new world"
        assert all(each[1] <= equal for each in shares[tried + 2 :] if each)


@pytest.mark.parametrize("seed", by_night(range(8), but=[0]))
def test_kills_and_arrivals_with_unequal_shares_change_nothing(seed, framework, data, tmp_path, long_undisturbed):
    start = (in_worker_with_shares, framework.name, data, tmp_path)
    with WorldDriver(start_with=3) as driver:
        driver.start(*start, count=3)
        driver.wait(lambda: any(driver.told("shares")))
        kill_and_add(driver, random.Random(seed), lambda: driver.start(*start))
        for result in driver.results(1):
            framework.trainings.assert_as_undisturbed(result, tmp_path, long_undisturbed)

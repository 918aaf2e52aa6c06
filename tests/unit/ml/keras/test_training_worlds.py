"""Trainings of Keras in worlds that differ and break; see `both/test_worlds.py` for what PyTorch does too."""

import pytest

from tests.unit.ml.in_worlds import BATCH, EPOCHS, ROWS
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import assert_as_undisturbed, close, in_worker, in_worker_variants
from tests.unit.worlds import WorldDriver

pytestmark = pytest.mark.nightly

VARIANTS = list(trainings.VARIANTS)
ALL = [*VARIANTS, *trainings.WORLDLY]


@pytest.fixture(scope="module")
def in_two(data, tmp_path_factory):
    """The outcomes of the variants in a world of two, by name, for each worker."""
    folder, results = tmp_path_factory.mktemp("two"), [{}, {}]
    with WorldDriver(start_with=2) as driver:
        driver.start(in_worker_variants, data, folder, ALL, count=2)
        for name in ALL:  # each has the time of a wait
            driver.wait(lambda name=name: driver.told("trained").count(name) == 2)
        for known, new in zip(results, driver.results(2), strict=True):
            known |= new
    return results, folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_setting_makes_the_result_depend_on_the_number_of_workers(variant, data, tmp_path, undisturbed, in_two):
    changes = trainings.variant_of(variant)
    expected = trainings.alone(trainings.make_training(data, tmp_path, **changes)), trainings.weights(tmp_path)
    results, folder = in_two
    for result in results:
        assert_as_undisturbed(result[variant], folder / variant, expected)
    assert (expected[1] == close(undisturbed[1])) == (variant == "a train_step of one's own"), "settings do something"


def test_settings_by_worker_follow_the_number_of_workers(undisturbed, in_two):
    results, folder = in_two
    for result in results:
        assert result["a batch for each worker"]["steps"] == EPOCHS * -(-ROWS // (2 * BATCH))
        assert result["compressed"]["history"][-1]["label_sum"] == undisturbed[0]["history"][-1]["label_sum"]
    compressed = trainings.weights(folder / "compressed")
    assert compressed != close(undisturbed[1])
    assert compressed == pytest.approx(undisturbed[1], abs=0.05)


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

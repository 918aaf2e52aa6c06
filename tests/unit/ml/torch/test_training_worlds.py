"""Trainings of PyTorch in worlds that differ and break; see `both/test_worlds.py` for what Keras does too."""

import pytest
import torch

from spark_elastic.data.dataset import Dataset
from tests.nightly import asked, by_night
from tests.unit.ml.in_worlds import BATCH, EPOCHS, ROWS, STEPS_AN_EPOCH, close
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.trainings import assert_as_undisturbed, in_worker
from tests.unit.worlds import WorldDriver, together

VARIANTS = [name for name in trainings.VARIANTS if name != "plain"]
BY_DAY = {"accumulation", "sample weights", "metrics with states", "batch normalisation, a last batch of one row"}


@pytest.fixture(scope="module")
def sets(data, weighted_data):
    """The dataset of each variant."""
    return {name: weighted_data if name == "sample weights" else data for name in [*VARIANTS, *trainings.WORLDLY]}


@pytest.fixture(scope="module")
def in_three(request, sets, tmp_path_factory):
    """The outcomes of the variants in one world of three, by name, for each worker."""
    names = [*asked(request, "variant"), *trainings.WORLDLY]
    folder = tmp_path_factory.mktemp("three")
    with WorldDriver(start_with=3) as driver:
        driver.start(trainings.in_worker_variants, {name: sets[name] for name in names}, folder, count=3)
        for name in names:  # each has the time of a wait
            driver.wait(lambda name=name: driver.told("trained").count(name) == 3)
        return driver.results(3), folder


@pytest.mark.parametrize("variant", by_night(VARIANTS, but=BY_DAY))
def test_no_setting_makes_the_result_depend_on_the_number_of_workers(variant, sets, tmp_path, undisturbed, in_three):
    single = trainings.make_training(sets[variant], tmp_path / "alone", **trainings.variant_of(variant))
    expected = trainings.alone(single), trainings.weights(tmp_path / "alone")
    results, folder = in_three
    for result in results:
        assert_as_undisturbed(result[variant], folder / variant, expected)
    changes_nothing = {"accumulation", "no prefetch", "metrics with states"}
    assert (expected[1] == close(undisturbed[1])) == (variant in changes_nothing)


def test_settings_by_worker_follow_the_number_of_workers(undisturbed, in_three):
    results, folder = in_three
    for result in results:
        assert result["a batch for each worker"]["steps"] == EPOCHS * -(-ROWS // (3 * BATCH))
        # shares of 2 and 1 rows in up to 3 parts: some workers have fewer parts than others
        parts = "batch normalisation of parts"
        assert result[parts]["steps"] == EPOCHS * 51
        assert result[parts]["history"] == results[0][parts]["history"]
    compressed = trainings.weights(folder / "compressed")
    assert compressed != close(undisturbed[1])
    assert compressed == pytest.approx(undisturbed[1], abs=0.05)


@pytest.mark.parametrize(
    ("variant", "kill"),
    [
        ("batch normalisation", ("backward", STEPS_AN_EPOCH + 2)),
        ("batch normalisation, a last batch of one row", ("forward", 3)),
    ],
)
def test_a_worker_that_is_killed_changes_nothing_of_the_statistics(variant, kill, data, tmp_path):
    single = trainings.make_training(data, tmp_path / "alone", **trainings.variant_of(variant))
    expected = trainings.alone(single), trainings.weights(tmp_path / "alone")
    for result in together(in_worker, data, tmp_path / "three", {2: kill}, variant, count=3, left=2):
        assert_as_undisturbed(result, tmp_path / "three", expected)


def test_nan_loss_on_one_worker_ends_all_workers_at_the_same_step(data, tmp_path):
    results = together(trainings.in_worker_that_diverges, data, tmp_path, count=3)
    for result in results:
        assert (result["diverged"]["step"], result["diverged"]["epoch"]) == (STEPS_AN_EPOCH + 2, 1)
        assert len(result["history"]) == 1
    assert sorted(result["caused_divergence"] for result in results) == [False, False, True]


@pytest.mark.parametrize(
    ("file", "half"),
    by_night([("state.pt", True), ("checkpoint.json", False), ("model.pt", False)], but=[("state.pt", True)]),
)
def test_rank_0_that_is_killed_while_it_writes_changes_nothing(file, half, data, tmp_path, undisturbed):
    (result,) = together(in_worker, data, tmp_path, {1: ("store", file, half)}, left=1)
    assert_as_undisturbed(result, tmp_path, undisturbed)


@pytest.mark.nightly
def test_running_means_are_those_of_one_worker_in_the_end(data, tmp_path):
    results = together(trainings.in_worker_with_norm, data, tmp_path, count=3)
    rows = next(Dataset.open(data).reader("validation", batch_size=1000).epoch(0))
    net = trainings.make_net(norm=True)
    net.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    output = net.eval()(torch.from_numpy(rows["features_0"]))
    loss = torch.nn.functional.cross_entropy(output, torch.from_numpy(rows["label_0"])).item()
    for result in results:
        assert result["history"][-1]["val_loss"] == close(loss)


def test_all_workers_stop_when_one_of_them_asks_for_it(data, tmp_path):
    results = together(trainings.in_worker_that_stops, data, tmp_path, count=3)
    assert [result["steps"] for result in results] == [5, 5, 5]
    assert results[1]["stopped"] == "rank 1 has seen enough"
    assert results[0]["stopped"] == "a callback of another worker requested the end of the training"

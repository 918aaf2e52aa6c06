"""Trainings of Keras in worlds that differ and break; see `both/test_worlds.py` for what PyTorch does too."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from spark_elastic.data.dataset import pack
from tests.unit.ml.in_worlds import BATCH, EPOCHS, ROWS
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import (
    assert_as_undisturbed,
    close,
    in_worker,
    in_worker_variants,
    make_net,
    make_training,
    outcome,
)
from tests.unit.worlds import WorldDriver, together

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


# --- losses over sequences with a mask ----------------------------------------------------------------


SEQUENCES, LONGEST, WORDS, FEW = 41, 6, 7, 8


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Sequences of 1 to 6 tokens, padded with 0, with a label for each token; rows of which a third weigh nothing."""
    generator = np.random.default_rng(11)
    folder = tmp_path_factory.mktemp("tokens")
    kept = np.arange(LONGEST) < generator.integers(1, LONGEST + 1, (SEQUENCES, 1))
    words = generator.integers(1, WORDS, (SEQUENCES, LONGEST)) * kept
    pack({"features_0": words, "label_0": words % 3}, folder / "tokens", shards=2)
    weights = generator.uniform(0.5, 2.0, SEQUENCES) * (np.arange(SEQUENCES) % 3 > 0)
    rows = {
        "features_0": generator.normal(size=(SEQUENCES, 6)),
        "label_0": np.arange(SEQUENCES) % 3,
        "sample_weight": weights,
    }
    pack(rows, folder / "zero weights", shards=2)
    return folder


def tagger(mask_zero=True):
    table = keras.layers.Embedding(
        WORDS, 5, mask_zero=mask_zero, embeddings_initializer=keras.initializers.RandomUniform(seed=4)
    )
    return keras.Sequential([keras.Input((LONGEST,), dtype="int64"), table, trainings.dense(3, 2)])


def changes_of(kind):
    """Return the settings of a training of some kind; "mean" and "sum" are reductions of a masked loss."""
    with trainings.in_float64():
        if kind == "zero weights":
            return {"rows": kind, "model": make_net(), "metrics": None, "weighted_metrics": ["accuracy"]}
        loss = trainings.cross_entropy(reduction="sum_over_batch_size" if kind == "mean" else "sum")
        factor = None if kind == "mean" else 1.0 / (FEW * LONGEST)
        return {"rows": "tokens", "model": tagger(), "loss": loss, "loss_weights": factor}


def train(data, folder, kind):
    changes = {"batch_size": FEW, "epochs": 2, "metrics": ["accuracy"], **changes_of(kind)}
    made = outcome(make_training(data, folder, **changes))
    return [{name: row[name] for name in ("loss", "accuracy")} for row in made["history"]]


def in_world(size, data, folder, kind):
    results = together(train, data, folder, kind, count=size)
    assert all(result == results[0] for result in results)
    return results[0], trainings.weights(folder)


@pytest.mark.parametrize("kind", ["sum", "mean", "zero weights"])
def test_masks_and_zero_weights_do_not_make_workers_matter(kind, tokens, tmp_path):
    history, weights = in_world(1, tokens, tmp_path / "1", kind)
    other, others = in_world(3, tokens, tmp_path / "3", kind)
    assert others == close(weights)
    for row, another in zip(history, other, strict=True):
        assert another == pytest.approx(row, rel=1e-9)

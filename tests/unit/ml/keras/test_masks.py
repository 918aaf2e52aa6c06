"""Losses over sequences with a mask: the kinds on which the number of workers has an effect, and those on which not."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from spark_elastic.data.dataset import pack
from spark_elastic.ml.keras.dry_run import dry_run
from spark_elastic.ml.keras.training import set_threads
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import close, make_net, make_training, outcome
from tests.unit.worlds import WorldDriver

ROWS, LONGEST, WORDS, BATCH = 41, 6, 7, 8


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Sequences of 1 to 6 tokens, padded with 0, with a label for each token; rows of which a third weigh nothing."""
    generator = np.random.default_rng(11)
    folder = tmp_path_factory.mktemp("tokens")
    kept = np.arange(LONGEST) < generator.integers(1, LONGEST + 1, (ROWS, 1))
    words = generator.integers(1, WORDS, (ROWS, LONGEST)) * kept
    pack({"features_0": words, "label_0": words % 3}, folder / "tokens", shards=2)
    weights = generator.uniform(0.5, 2.0, ROWS) * (np.arange(ROWS) % 3 > 0)
    rows = {"features_0": generator.normal(size=(ROWS, 6)), "label_0": np.arange(ROWS) % 3, "sample_weight": weights}
    pack(rows, folder / "zero weights", shards=2)
    return folder


def tagger(mask_zero=True):
    table = keras.layers.Embedding(
        WORDS, 5, mask_zero=mask_zero, embeddings_initializer=keras.initializers.RandomUniform(seed=4)
    )
    return keras.Sequential([keras.Input((LONGEST,), dtype="int64"), table, trainings.dense(3, 2)])


def changes_of(kind, virtual=None):
    """Return the settings of a training of some kind; "mean" and "sum" are reductions of a masked loss."""
    with trainings.in_float64():
        if kind == "zero weights":
            return {"rows": kind, "model": make_net(), "metrics": None, "weighted_metrics": ["accuracy"]}
        loss = trainings.cross_entropy(reduction="sum_over_batch_size" if kind == "mean" else "sum")
        factor = None if kind == "mean" else 1.0 / (BATCH * LONGEST)
        return {"rows": "tokens", "model": tagger(), "loss": loss, "loss_weights": factor, "virtual_workers": virtual}


def train(data, folder, kind, virtual=None):
    set_threads(1)
    changes = {"batch_size": BATCH, "epochs": 2, "metrics": ["accuracy"], **changes_of(kind, virtual)}
    made = outcome(make_training(data, folder, **changes))
    return [{name: row[name] for name in ("loss", "accuracy")} for row in made["history"]]


def in_world(size, data, folder, kind, virtual=None):
    with WorldDriver(start_with=size) as driver:
        driver.start(train, data, folder, kind, virtual, count=size)
        results = driver.results(size)
    assert all(result == results[0] for result in results)
    return results[0], trainings.weights(folder)


@pytest.mark.parametrize(("kind", "independent"), [("sum", True), ("zero weights", True), ("mean", False)])
def test_only_a_mean_over_a_mask_depends_on_the_number_of_workers(kind, independent, tokens, tmp_path):
    """A mean over unmasked elements is one over those of each worker's rows; docs/limits.md names the remedies."""
    history, weights = in_world(1, tokens, tmp_path / "1", kind)
    other, others = in_world(3, tokens, tmp_path / "3", kind)
    assert (others == close(weights)) == independent
    for row, another in zip(history, other, strict=True):
        assert (another["loss"] == close(row["loss"])) == independent
        assert another["accuracy"] == pytest.approx(row["accuracy"], abs=1e-9 if independent else 0.1)


def test_with_virtual_workers_a_masked_mean_depends_on_their_number_alone(tokens, tmp_path):
    one = in_world(1, tokens, tmp_path / "1", "mean", 2)
    assert in_world(3, tokens, tmp_path / "3", "mean", 2) == one
    assert in_world(1, tokens, tmp_path / "other", "mean", 4)[1] != close(one[1])


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"model": tagger, "loss": lambda: "sparse_categorical_crossentropy"}, True),
        ({"model": tagger, "loss": lambda: trainings.cross_entropy(reduction="mean_with_sample_weight")}, True),
        ({"model": tagger, "loss": lambda: trainings.cross_entropy(reduction="sum")}, False),
        ({"model": tagger, "loss": lambda: trainings.cross_entropy(), "virtual_workers": 2}, False),
        ({"model": lambda: tagger(False), "loss": lambda: trainings.cross_entropy(ignore_class=0)}, True),
        ({"model": lambda: tagger(False), "loss": lambda: trainings.cross_entropy()}, False),
    ],
    ids=["masked", "by weight", "sum", "exact", "ignored class", "no mask"],
)
def test_masked_mean_is_warned_of_before_any_worker_starts(changes, warns, tokens, tmp_path, caplog):
    with trainings.in_float64():
        made = {name: value() if callable(value) else value for name, value in changes.items()}
    dry_run(make_training(tokens, tmp_path, rows="tokens", batch_size=BATCH, **made), None)
    assert ("the mean over the elements that a mask leaves" in caplog.text) == warns

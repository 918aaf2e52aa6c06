"""Losses over sequences with a mask, by one worker and by three."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from spark_elastic.data.dataset import pack
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import close, make_net, make_training, outcome
from tests.unit.worlds import together

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


def changes_of(kind):
    """Return the settings of a training of some kind; "mean" and "sum" are reductions of a masked loss."""
    with trainings.in_float64():
        if kind == "zero weights":
            return {"rows": kind, "model": make_net(), "metrics": None, "weighted_metrics": ["accuracy"]}
        loss = trainings.cross_entropy(reduction="sum_over_batch_size" if kind == "mean" else "sum")
        factor = None if kind == "mean" else 1.0 / (BATCH * LONGEST)
        return {"rows": "tokens", "model": tagger(), "loss": loss, "loss_weights": factor}


def train(data, folder, kind):
    changes = {"batch_size": BATCH, "epochs": 2, "metrics": ["accuracy"], **changes_of(kind)}
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

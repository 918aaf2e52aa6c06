"""Losses and metrics of Keras come back with all of their arguments, also with those that Keras leaves out."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from spark_elastic.ml.keras import safe_objects  # noqa: E402
from spark_elastic.ml.keras.pickling import KerasPickle  # noqa: E402
from spark_elastic.ml.keras.serialization import comparable_config  # noqa: E402

WITH_ARGUMENTS = [
    (keras.losses.Huber, {"delta": 2.5}),
    (keras.losses.CosineSimilarity, {"axis": 1}),
    (keras.losses.SparseCategoricalCrossentropy, {"axis": 1, "from_logits": True, "ignore_class": 3}),
    (keras.losses.CategoricalCrossentropy, {"label_smoothing": 0.1}),
    (keras.metrics.CosineSimilarity, {"axis": 1}),
    (keras.metrics.SparseTopKCategoricalAccuracy, {"k": 3}),
]


@pytest.mark.parametrize(("kind", "arguments"), WITH_ARGUMENTS)
def test_arguments_survive_saving_without_trust_and_pickling(kind, arguments):
    made = kind(**arguments)
    file = safe_objects.dumps({"loss": [made]})
    assert file is not None
    for loaded in (safe_objects.loads(file)["loss"][0], KerasPickle.of(made).load()):
        assert type(loaded) is kind
        for name, value in arguments.items():
            assert loaded._fn_kwargs[name] == value
    assert comparable_config(made) == comparable_config(kind(**arguments)) != comparable_config(kind())


LOSSES = [
    kind
    for _, kind in sorted(vars(keras.losses).items())
    if isinstance(kind, type) and issubclass(kind, keras.losses.Loss) and kind is not keras.losses.Loss
]


@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", LOSSES)
def test_type_of_a_loss_survives_saving_without_trust_and_pickling(kind, dtype):
    made = kind(dtype=dtype)
    assert made.dtype != kind().dtype
    file = safe_objects.dumps(made)
    assert file is not None
    for loaded in (safe_objects.loads(file), KerasPickle.of(made).load()):
        assert type(loaded) is kind
        assert loaded.dtype == made.dtype
    assert comparable_config(made) != comparable_config(kind())


def test_an_argument_may_be_an_array():
    made = keras.losses.CategoricalFocalCrossentropy(alpha=np.array([0.2, 0.3, 0.5]), axis=1)
    file = safe_objects.dumps(made)
    assert file is not None
    loaded = safe_objects.loads(file)
    assert loaded.axis == 1
    np.testing.assert_array_equal(loaded.alpha, made.alpha)
    assert comparable_config(made) is not None

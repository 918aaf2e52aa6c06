"""With a version of Keras whose safe mode is not safe, only trusted files are loaded."""

from __future__ import annotations

import keras
import pytest

from spark_elastic.errors import CheckpointError
from spark_elastic.ml import trust
from spark_elastic.ml.keras import safe_objects, serialization


def test_an_old_keras_loads_no_archive_and_no_settings(monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    archive, settings = serialization.model_to_archive(model), safe_objects.dumps(keras.losses.MeanSquaredError())
    monkeypatch.setattr(keras, "__version__", "3.10.0")
    for load in (lambda: serialization.model_from_archive(archive, safe=True), lambda: safe_objects.loads(settings)):
        with pytest.raises(CheckpointError, match=r"keras 3\.10\.0 is installed.*keras>=3\.11\.3"):
            load()
        with trust.trusted_files():
            assert load() is not None

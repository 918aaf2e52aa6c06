"""Trainings of models with weights that the loss does not depend on, and of sparse gradients that are clipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from spark_elastic.data.dataset import pack
from spark_elastic.ml.keras.engine import MODEL_FILE
from spark_elastic.ml.keras.serialization import arrays_from_bytes
from tests.unit.ml.keras.trainings import cross_entropy, dense, in_float64, make_training, outcome
from tests.unit.worlds import together

ROWS, BATCH = 40, 8

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")


@keras.saving.register_keras_serializable("missing")
class Unused(keras.layers.Layer):
    """A layer with another one that its call leaves out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.base, self.never = dense(3, 1), dense(3, 2)

    def build(self, shape: Any) -> None:
        self.base.build(shape)
        self.never.build(shape)
        self.built = True

    def call(self, features: Any) -> Any:
        return self.base(features)


def unused() -> Any:
    inputs = keras.Input((6,))
    return keras.Model(inputs, Unused()(inputs))


def headed() -> Any:
    inputs = keras.Input((6,))
    shared = dense(5, 1, activation="tanh")(inputs)
    return keras.Model(inputs, [dense(3, 2)(shared), dense(2, 3)(shared)])


def embedded() -> Any:
    words = keras.Input((4,), dtype="int64")
    table = keras.layers.Embedding(7, 5, embeddings_initializer=keras.initializers.RandomUniform(seed=4))
    return keras.Model(words, dense(3, 2)(keras.layers.Flatten()(table(words))))


def sgd(**more: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **more)


def adamw(**more: Any) -> Any:
    return keras.optimizers.AdamW(0.05, weight_decay=0.1, **more)


Variant = tuple[Callable[[], Any], Callable[..., Any], dict[str, Any], dict[str, Any]]
VARIANTS: dict[str, Variant] = {
    "a layer that is not called": (unused, sgd, {"weight_decay": 0.1}, {}),
    "an output without a loss": (headed, sgd, {"weight_decay": 0.1}, {}),
    "accumulation": (headed, adamw, {}, {"accumulation": 2}),
    "fewer rows than workers": (headed, adamw, {}, {"batch_size": 2}),
    "bounds": (headed, adamw, {"global_clipnorm": 0.3}, {"clip_norm": 0.3, "clip_value": 10.0}),
    "sparse, a bound of the norm": (embedded, sgd, {"global_clipnorm": 0.1}, {"clip_norm": 0.1}),
    "sparse, a bound of the values": (embedded, sgd, {"clipvalue": 0.01}, {"clip_value": 0.01}),
    "sparse, Keras' bound of each norm": (embedded, sgd, {"clipnorm": 0.05}, {"own": True}),
}


def losses(model: Any) -> Any:
    return [cross_entropy(), None] if len(model.outputs) == 2 else cross_entropy()


def write_sets(folder: Path) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(4)
    features = generator.normal(size=(ROWS, 6))
    rows = {"numbers": features, "words": np.abs(features[:, :4] * 4).astype(np.int64) % 7}
    labels = features.argmax(1) % 3
    for name, values in rows.items():
        pack({"features_0": values, "label_0": labels}, folder / name, shards=1)
    return {**rows, "labels": labels}


def step(model: Any, features: np.ndarray, labels: np.ndarray, own: bool) -> None:
    """Do a step as `model.fit` does if the bounds are the optimizer's `own`, and otherwise with dense gradients.

    Keras takes the norm of a sparse gradient with a row's entries not yet added up.
    """
    with tf.GradientTape() as tape:
        outputs = model(features, training=True)
        loss = cross_entropy()(labels, outputs[0] if isinstance(outputs, list) else outputs)
    gradients = tape.gradient(loss, model.trainable_variables)
    if not own:
        gradients = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
    model.optimizer.apply(gradients, model.trainable_variables)


def by_plain_keras(variant: str, rows: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the weights before and after a training in one process, by Keras alone."""
    make, optimizer, options, settings = VARIANTS[variant]
    with in_float64():
        model = make()
        before = model.get_weights()
        model.compile(optimizer=optimizer(**options), loss=losses(model), jit_compile=False)
        size, values = settings.get("batch_size", BATCH), rows["words" if make is embedded else "numbers"]
        for _ in range(2):
            for begin in range(0, ROWS, size):
                part = slice(begin, begin + size)
                step(model, values[part], rows["labels"][part], settings.get("own", False))
        return before, model.get_weights()


def train_all(data: Path, folder: Path) -> int:
    for variant, (make, optimizer, options, settings) in VARIANTS.items():
        settings = dict(settings)
        bounds = {"clipnorm", "clipvalue", "global_clipnorm"}
        own = settings.pop("own", False)
        with in_float64():
            model = make()
            kept = {name: value for name, value in options.items() if own or name not in bounds}
            changes = {"optimizer": optimizer(**kept), "loss": losses(model), "metrics": None, "model": model}
        chosen = {"batch_size": BATCH, "epochs": 2, "shuffle": False, **changes, **settings}
        rows = "words" if make is embedded else "numbers"
        outcome(make_training(data, folder / variant, rows=rows, **chosen))
    return len(VARIANTS)


def differences(rows: dict[str, np.ndarray], folder: Path) -> list[str]:
    out = []
    for variant, (make, *_) in VARIANTS.items():
        before, wanted = by_plain_keras(variant, rows)
        if make is not embedded:
            assert np.array_equal(before[2 if make is unused else 4], wanted[2 if make is unused else 4])
        found = list(arrays_from_bytes((folder / variant / MODEL_FILE).read_bytes()).values())
        off = [float(np.abs(one - want).max()) for one, want in zip(found, wanted, strict=True)]
        if max(off) > 1e-9:
            out.append(f"{variant}: {off}")
    return out


@pytest.mark.nightly
def test_workers_train_weights_without_gradients_as_plain_keras(tmp_path):
    rows = write_sets(tmp_path / "sets")
    together(train_all, tmp_path / "sets", tmp_path / "store", count=3)
    assert differences(rows, tmp_path / "store") == []

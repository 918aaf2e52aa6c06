"""Pickle Keras objects for other processes, together with the user's classes and functions that they refer to.

A `KerasPickle` is bytes until `load` is called, because loading a plain pickle imports TensorFlow at once.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from spark_elastic.ml.keras.tensorflow_setup import prefer_backend


@dataclass(slots=True, eq=False, repr=False)
class KerasPickle:
    """A pickled value; each call of `load` returns a new copy: models are not compiled, optimizers have no steps."""

    _file: bytes

    @classmethod
    def of(cls, value: Any, custom_objects: Mapping[str, Any] | None = None) -> KerasPickle:
        return cls(dumps(value, custom_objects))

    def load(self) -> Any:
        prefer_backend()
        return pickle.loads(self._file)


def dumps(value: Any, custom_objects: Mapping[str, Any] | None = None, *, compiled: bool = False) -> bytes:
    """Return a pickle that any Python process with the same packages can load; `compiled`: models stay compiled."""
    file = io.BytesIO()
    _KerasPickler(file, custom_objects, compiled).dump(value)
    return file.getvalue()


class _KerasPickler(cloudpickle.Pickler):
    def __init__(self, file: Any, custom_objects: Mapping[str, Any] | None, compiled: bool) -> None:
        super().__init__(file)
        self._given = custom_objects
        self._compiled = compiled

    def reducer_override(self, value: Any) -> Any:
        import keras

        from spark_elastic.keras import archives
        from spark_elastic.ml.keras import compiling, fidelity, serialization

        def objects_of(config: Any) -> dict[str, Any]:
            names = serialization.custom_names(value, config)
            return serialization.custom_objects_of(value, names, self._given)

        if isinstance(value, (keras.Model, keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)):
            serialization.check_config(value, pickle.PicklingError)
            if isinstance(value, keras.Model):
                file = serialization.model_to_archive(value)
                arguments = compiling.compiled_with(value) if self._compiled else {}
                optimizer = compiling.values_of(value.optimizer) if arguments else None
                flags = tuple(serialization.Flags.of(value)) if value.built else None
                objects = objects_of(archives.archive_config(file))
                adapters = fidelity.adapters_of(value)
                return load_model, (file, objects, arguments, optimizer, flags, *([adapters] if adapters else []))
            config = serialization.config_of(value)
            if isinstance(value, keras.layers.Layer) and value.built and value.variables:
                weights = [each.numpy() for each in value.variables]
                return load_layer, (config, objects_of(config), tuple(serialization.Flags.of(value)), weights)
            patterns = fidelity.undecayed(value, pickle.PicklingError)
            return load_object, (config, objects_of(config), *([patterns] if patterns else []))
        if isinstance(value, keras.losses.Loss):  # an object without a state, whose configuration may be incomplete
            return object.__new__, (type(value),), dict(vars(value))
        return super().reducer_override(value)


# Pickles name these functions: files of saved estimators and models hold their module and name.


def load_model(
    file: bytes,
    custom_objects: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    values: Any = None,
    flags: Any = None,
    adapters: Any = (),
) -> Any:
    """Load a model from its archive, with its `Flags`, what it was compiled with, and its `fidelity.adapters_of`."""
    from spark_elastic.ml.keras.compiling import build_optimizer
    from spark_elastic.ml.keras.fidelity import restore_adapters
    from spark_elastic.ml.keras.serialization import Flags, model_from_archive

    with contextlib.nullcontext() if flags is None else Flags(*flags).creating():
        model = model_from_archive(file, custom_objects)
    if flags is not None:
        Flags(*flags).restore(model)
    restore_adapters(model, adapters)
    if arguments:
        model.compile(**arguments)
        if values is not None:
            build_optimizer(model, values)
    return model


def load_object(config: Any, custom_objects: Mapping[str, Any], patterns: Sequence[str] = ()) -> Any:
    """Load a pickled layer, optimizer or metric from its configuration; `patterns` are of `fidelity.undecayed`."""
    import keras

    made = inner = keras.saving.deserialize_keras_object(config, custom_objects=custom_objects, safe_mode=False)
    for pattern in patterns:
        if pattern:
            inner.exclude_from_weight_decay(var_names=[pattern])
        inner = getattr(inner, "inner_optimizer", None)
    return made


def load_layer(config: Any, custom_objects: Mapping[str, Any], flags: Any, weights: Sequence[Any]) -> Any:
    from spark_elastic.ml.keras.serialization import Flags

    with Flags(*flags).creating():
        layer = load_object(config, custom_objects)
    if [tuple(each.shape) for each in layer.variables] != [each.shape for each in weights]:
        raise pickle.UnpicklingError(
            f"the layer {layer.name} has other weights when it is built from its configuration"
        )
    for variable, value in zip(layer.variables, weights, strict=True):
        variable.assign(value)
    Flags(*flags).restore(layer)
    return layer

"""Keras objects on their way to other processes.

They pickle by themselves only as long as whoever unpickles them knows their classes by name, and loading the pickle
imports TensorFlow. What is sealed is bytes until it is opened, and brings the user's classes and functions along, those
of `__main__` too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle

from spark_elastic.ml.keras.backend import prefer_backend


class Sealed:
    """A value that is pickled by now. `open()` gives a copy of it, another one each time.

    A model comes back built, with its weights, and not compiled; optimizers, metrics and losses as new ones with the
    same settings.
    """

    __slots__ = ("_file",)

    def __init__(self, file: bytes) -> None:
        self._file = file

    @classmethod
    def of(cls, value: Any, custom_objects: Mapping[str, Any] | None = None) -> Sealed:
        """custom_objects: classes and functions by the names that Keras knows them by; those in use are found without.

        Raises: whatever pickle and Keras do for what cannot be written.
        """
        return cls(dumps(value, custom_objects))

    def open(self) -> Any:
        prefer_backend()
        return pickle.loads(self._file)

    def __len__(self) -> int:
        """Bytes."""
        return len(self._file)


def dumps(value: Any, custom_objects: Mapping[str, Any] | None = None, *, compiled: bool = False) -> bytes:
    """A pickle of the value, which any Python with the same packages loads.

    compiled: models come back as they were compiled.
    """
    file = io.BytesIO()
    _Pickler(file, custom_objects, compiled).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: Any, custom_objects: Mapping[str, Any] | None, compiled: bool) -> None:
        super().__init__(file)
        self._given = custom_objects
        self._compiled = compiled

    def reducer_override(self, value: Any) -> Any:
        import keras

        from spark_elastic.ml.keras import archives, compiling
        from spark_elastic.ml.keras.custom_objects import custom_objects_of, not_described, own_names

        if isinstance(value, (keras.Model, keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)):
            if (kind := not_described(value)) is not None:
                raise pickle.PicklingError(
                    f"{kind}.get_config() leaves out arguments of {kind}.__init__; it has to return all of them"
                )
            if isinstance(value, keras.Model):
                file = archives.dumps(value)
                names = own_names(value, archives.config_of(file))
                plain = file, custom_objects_of(value, names, self._given)
                if self._compiled and (arguments := compiling.compiled_with(value)):
                    return _compiled, (*plain, arguments, compiling.values_of(value.optimizer))
                return archives.loads, plain
            config = keras.saving.serialize_keras_object(value)
            return _made, (config, custom_objects_of(value, own_names(value, config), self._given))
        if isinstance(value, keras.losses.Loss):  # plain objects, whose config may leave out what they need
            return object.__new__, (type(value),), dict(vars(value))
        return super().reducer_override(value)


def _made(config: Any, custom_objects: Mapping[str, Any]) -> Any:
    import keras

    return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects, safe_mode=False)


def _compiled(file: bytes, custom_objects: Mapping[str, Any], arguments: Mapping[str, Any], values: Any) -> Any:
    from spark_elastic.ml.keras import archives, compiling

    model = archives.loads(file, custom_objects)
    compiling.compile_again(model, arguments, values)
    return model

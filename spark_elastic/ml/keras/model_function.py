"""A Keras model that is given as a function: one that Keras cannot save, or whose widths follow from the rows.

Can be imported without TensorFlow.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.keras.pickling import KerasPickle
from spark_elastic.ml.keras.tensorflow_setup import global_config, set_global_config
from spark_elastic.ml.model_function import Shapes, call, name_of, seeded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KerasFunction:
    """The function of the setting `model`, the arguments of its calls, and the weights of its models.

    Each call begins as the first one, on the driver: with the same random numbers, global settings and names of layers.

    Attributes:
        function: Pickled, because loading a plain pickle of it would import TensorFlow.
        shapes: Of the inputs.
        dtypes: The numpy type of each input.
        config: The `global_config` of Keras.
        names: By name, how many objects Keras had named before the first call.
        weights: A file of `serialization.weights_to_bytes` for the models of `load`.
    """

    function: KerasPickle
    shapes: Shapes
    dtypes: tuple[str, ...]
    seed: int
    config: Mapping[str, Any]
    names: Mapping[str, int]
    weights: bytes = b""

    @classmethod
    def of(cls, function: KerasPickle, shapes: Shapes, dtypes: tuple[str, ...], seed: int) -> KerasFunction:
        """Return the function with the names and settings that Keras has in this process."""
        from keras.src.backend.common import global_state

        names = dict(global_state.get_global_attribute(_NAMES) or {})
        config = global_config()
        return cls(function=function, shapes=shapes, dtypes=dtypes, seed=seed, config=config, names=names)

    def made(self) -> Any:
        """Return a new model, built, and compiled if the function compiles it. Raises InvalidSettingsError."""
        function = self.function.load()
        import keras

        from spark_elastic.ml.keras.compiling import build, check_takes_any_rows, is_built

        with self._first_call():
            model = call(function, self.shapes, keras.Model, "keras.Model")
            check_takes_any_rows(model)
            if not is_built(model):
                build(model, [(kind, shape[1:]) for kind, shape in zip(self.dtypes, self.shapes, strict=True)])
        return model

    def load(self) -> Any:
        """Return a new model with the weights, not compiled. Raises InvalidSettingsError."""
        from spark_elastic.ml.keras.serialization import fill

        model = self.made()
        for each in model._flatten_layers():
            if vars(each).get("compiled"):
                vars(each)["compiled"] = False
        try:
            return fill(model, self.weights)
        except CheckpointError as error:
            raise InvalidSettingsError(
                f"model={name_of(self.function.load())} made another model than at its first call, on the driver: "
                f"{error.message}. It must make the same layers at each call"
            ) from error

    def with_weights_of(self, model: Any) -> KerasFunction:
        from spark_elastic.ml.keras.serialization import weights_to_bytes

        return replace(self, weights=weights_to_bytes(model))

    @contextlib.contextmanager
    def _first_call(self) -> Iterator[None]:
        """Restore within the block what Keras and random numbers were at the first call."""
        import keras
        import tensorflow as tf
        from keras.src.backend.common import global_state
        from tensorflow.python.eager.context import context

        with seeded(self.seed):
            settings = {**global_config(), "dtype_policy": keras.config.dtype_policy()}
            of_tensorflow = context()
            of_keras = {name: global_state.get_global_attribute(name) for name in (_NAMES, _GENERATOR)}
            drawn = {name: vars(of_tensorflow)[name] for name in ("_seed", "_rng") if name in vars(of_tensorflow)}
            try:
                set_global_config(self.config)
                global_state.set_global_attribute(_NAMES, collections.defaultdict(int, self.names))
                global_state.set_global_attribute(_GENERATOR, None)
                tf.random.set_seed(self.seed)
                yield
            finally:
                vars(of_tensorflow).update(drawn)
                for name, value in of_keras.items():
                    global_state.set_global_attribute(name, value)
                set_global_config(settings)


_NAMES, _GENERATOR = "object_name_uids", "global_seed_generator"
"""The global attributes of Keras with the counts of names, and the generator of its random numbers without a seed."""

"""ElasticKerasModel: a trained Keras model as a Spark ML Transformer, and how executors predict with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.fitted import Fitted
from spark_elastic.ml.keras.model_function import KerasFunction
from spark_elastic.ml.keras.pickling import KerasPickle
from spark_elastic.ml.keras.tensorflow_setup import check_backend, device_name, prefer_backend, set_threads, use_gpus
from spark_elastic.ml.model import ElasticModel
from spark_elastic.ml.persistence import ElasticReader
from spark_elastic.ml.saved_stage import Codec, SavedParts
from spark_elastic.ml.serving import ROWS, Predictor, gpu_of_task

_T = TypeVar("_T", bound="ElasticKerasModel")


class ElasticKerasModel(ElasticModel):
    """The result of `ElasticKerasEstimator.fit`: `transform` appends the outputs of the trained model.

    `keras_model` is the trained `keras.Model`; `history` and `events` are as of `ElasticModel`.

    Raises:
        MissingExtraError: TensorFlow is not installed.
    """

    _native_name = "keras_model"
    _custom_objects: Mapping[str, Any] = {}
    _made_by: KerasFunction | None = None  # the function that has made the model, if one was given
    _here: KerasPredictor | None = None  # the predictor of `predict`, with what it has traced

    def __init__(self, **settings: Any) -> None:
        check_backend(type(self).__name__)
        super().__init__(**settings)

    @property
    def keras_model(self) -> Any:
        """The trained Keras model, not compiled. Not a copy."""
        self._facts_of_fit()  # raises if there is none
        return self._native

    @classmethod
    def load(cls: type[_T], path: str, *, trusted: bool = False, custom_objects: Mapping[str, Any] | None = None) -> _T:
        """Load a model that was saved at `path`.

        Args:
            path: the path that `save` was given.
            trusted: run code that the files name; needed for classes and functions of your own, unless they are
                registered with Keras in this process (`@keras.saving.register_keras_serializable()`), and for Lambda
                layers.
            custom_objects: your classes and functions by their names. Their saved code is then not read, so no trust is
                needed.

        Raises:
            CheckpointError: the path holds no such model, or a damaged one, or one that needs trust.
        """
        instead = {} if custom_objects is None else {"custom_objects": dict(custom_objects)}
        return ElasticReader(cls, trusted, **instead).load(path)

    @classmethod
    def _codec(cls) -> Codec:
        check_backend(cls.__name__)
        from spark_elastic.ml.keras import safe_objects

        return safe_objects

    def _attach(
        self,
        model: Any,
        fitted: Fitted,
        custom_objects: Mapping[str, Any] | None = None,
        made_by: KerasFunction | None = None,
    ) -> None:
        self._native, self._fitted, self._custom_objects = model, fitted, dict(custom_objects or {})
        self._made_by = made_by

    def _predictor(self) -> Callable[[], Predictor]:
        model, made_by = self.keras_model, self._made_by
        carried = KerasPickle.of(model, self._custom_objects) if made_by is None else made_by.with_weights_of(model)
        return partial(_load_predictor, carried, *self._computing())

    def _own_predictor(self) -> Predictor:
        model = self.keras_model
        if self._here is None or self._here.model is not model:
            self._here = KerasPredictor(model)
        return self._here

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": None}  # TensorFlow's functions cannot be pickled

    def _parts(self) -> SavedParts:
        from spark_elastic.ml.keras import saved_model

        facts = self._facts_of_fit().to_json()
        return saved_model.parts_of(self.keras_model, facts, self._custom_objects, self._made_by)

    @classmethod
    def _present(cls, facts: Mapping[str, Any]) -> dict[str, Any]:
        from spark_elastic.ml.keras import saved_model

        return saved_model.present(facts)

    def _restore(self, facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> None:
        from spark_elastic.ml.keras import saved_model

        super()._restore(facts, files, objects)
        self._native = saved_model.native_of(facts, files, objects)
        self._custom_objects = objects.get(saved_model.OBJECTS, {})
        self._made_by = objects.get(saved_model.FUNCTION)


def _load_predictor(model: KerasPickle | KerasFunction, transform_device: str, threads: int) -> Predictor:
    """Load a model on an executor's device. TensorFlow takes `threads` only before it runs in a process."""
    prefer_backend()
    import tensorflow as tf

    gpus = [] if transform_device.lower().startswith("cpu") else tf.config.list_physical_devices("GPU")
    if transform_device == "auto" and not gpus:
        transform_device = "cpu"
    device = device_name("gpu" if transform_device == "auto" else transform_device)
    if ":" not in transform_device and len(gpus) > 1:  # the one that is left is number 0
        gpus = [gpus[gpu_of_task(len(gpus))[0]]]
    use_gpus(gpus)
    set_threads(threads)
    try:
        with tf.device(device):
            tf.constant(0.0)
            return KerasPredictor(model.load(), device)
    except (RuntimeError, ValueError) as error:
        if "device" not in str(error).lower():
            raise
        raise InvalidSettingsError(f"{transform_device=!r} cannot be used on this executor: {error}") from error


class KerasPredictor:
    """Calls a model with arrays by name; returns arrays or None. Traced once for all rows of one type and shape."""

    rows = ROWS

    def __init__(self, model: Any, device: str = "/CPU:0") -> None:
        self.model = model
        self._device = device
        self._traces: dict[tuple[Any, ...], Any] = {}

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        import tensorflow as tf

        from spark_elastic.ml.keras.compiling import check_kept

        arrays = [_array(name, value) for name, value in inputs.items()]
        for at, (name, array) in enumerate(zip(inputs, arrays, strict=True)):
            check_kept(self.model, at, name, array)
        key = tuple((each.dtype.str, each.shape[1:]) for each in arrays)
        if key not in self._traces:
            self._traces[key] = self._trace(arrays)
        try:
            with tf.device(self._device):
                return [None if each is None else each.numpy() for each in self._traces[key](*map(tf.constant, arrays))]
        except tf.errors.ResourceExhaustedError as error:
            raise MemoryError(str(error).partition("\n")[0]) from None

    def _trace(self, arrays: list[npt.NDArray[Any]]) -> Any:
        import keras
        import tensorflow as tf

        from spark_elastic.ml.keras.compiling import inputs_of

        def outputs(*tensors: Any) -> list[Any]:
            returned = self.model(inputs_of(self.model, tensors), training=False)
            made = list(keras.tree.flatten(returned))
            for each in made:
                if each is not None and not tf.is_tensor(each):
                    raise DataError(f"the model returned {type(each).__name__}; tensors are needed")
            return [tf.cast(each, tf.float32) if getattr(each, "dtype", 0) == tf.bfloat16 else each for each in made]

        rows = [tf.TensorSpec((None, *each.shape[1:]), tf.as_dtype(each.dtype)) for each in arrays]
        # without autograph, as `predict` of Keras; it would leave files in TMPDIR for good
        return tf.function(outputs, input_signature=rows, autograph=False)


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    made = value.numpy() if hasattr(value, "numpy") else value
    if isinstance(made, np.ndarray) and made.dtype != object:
        return made
    raise DataError(
        f"the model takes arrays, and {name} is {type(value).__name__}; convert it to an array in inference_fn"
    )

"""A Keras model that predicts: numpy in, numpy out. On the executors in `transform`, and on the driver before that."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.keras.pickling import Sealed
from spark_elastic.ml.serving import Predictor

log = logging.getLogger("spark_elastic.ml")

_DEVICE = re.compile(r"(cpu|gpu|cuda)(?::(\d+))?$")


@dataclass(frozen=True)
class KerasSavedPredictor:
    """A model on its way to the executors. threads: of TensorFlow, which takes what it is told first in a process."""

    model: Sealed
    device: str
    threads: int

    def load(self) -> Predictor:
        """Raises: InvalidSettingsError: there is no such device here."""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # it says what it was built for in every process
        import tensorflow as tf

        device = device_name(self.device)
        with contextlib.suppress(RuntimeError):  # TensorFlow is running already
            if device.startswith("/CPU"):
                tf.config.set_visible_devices([], "GPU")  # or it takes all of their memory
            else:
                for gpu in tf.config.list_physical_devices("GPU"):
                    tf.config.experimental.set_memory_growth(gpu, True)
        set_threads(self.threads)
        try:
            with tf.device(device):
                tf.constant(0.0)
                return KerasPredictor(self.model.open(), device)
        except (RuntimeError, ValueError) as error:
            if "device" not in str(error).lower():
                raise
            raise InvalidSettingsError(
                f"transform_device={self.device!r} cannot be used on this executor: {error}"
            ) from error


class KerasPredictor:
    """One trace for each shape of a row, whatever the number of rows.

    Raises: DataError: inputs that are no arrays; outputs that are no tensors.
    """

    def __init__(self, model: Any, device: str = "/CPU:0") -> None:
        self._model = model
        self._device = device
        self._traces: dict[tuple[Any, ...], Any] = {}

    def __call__(self, inputs: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        import tensorflow as tf

        from spark_elastic.ml.keras.structure import check_kept

        arrays = [_array(name, value) for name, value in inputs.items()]
        for at, (name, array) in enumerate(zip(inputs, arrays, strict=True)):
            check_kept(self._model, at, name, array)
        key = tuple((each.dtype.str, each.shape[1:]) for each in arrays)
        if key not in self._traces:
            self._traces[key] = self._trace(arrays)
        with tf.device(self._device):
            return [as_numpy(each) for each in self._traces[key](*map(tf.constant, arrays))]

    def _trace(self, arrays: list[npt.NDArray[Any]]) -> Any:
        import tensorflow as tf

        from spark_elastic.ml.keras.structure import inputs_of, outputs_of

        def outputs(*tensors: Any) -> list[Any]:
            made = outputs_of(self._model(inputs_of(self._model, tensors), training=False))
            for each in made:
                if not tf.is_tensor(each):
                    raise DataError(f"the model returned {type(each).__name__}; tensors are needed")
            return made

        rows = [tf.TensorSpec((None, *each.shape[1:]), tf.as_dtype(each.dtype)) for each in arrays]
        return tf.function(outputs, input_signature=rows)


def device_name(device: str) -> str:
    """TensorFlow's name for "cpu", "gpu", "gpu:1", "cuda", ... Raises: InvalidSettingsError: it is none of these."""
    found = _DEVICE.match(device.lower())
    if found is None:
        raise InvalidSettingsError(f"{device!r} is no device; 'cpu', 'gpu' and 'gpu:1' are some")
    kind = "CPU" if found[1] == "cpu" else "GPU"
    return f"/{kind}:{found[2] or 0}"


def set_threads(count: int) -> None:
    """Those of TensorFlow's operations. Once it runs there is no other number any more."""
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(count)
    except RuntimeError:
        has = tf.config.threading.get_intra_op_parallelism_threads()
        if has != count:
            log.info("TensorFlow runs with %s threads in this process, and cannot change to %s", has or "all", count)


def as_numpy(tensor: Any) -> npt.NDArray[Any]:
    import tensorflow as tf

    if tensor.dtype == tf.bfloat16:
        tensor = tf.cast(tensor, tf.float32)
    return tensor.numpy()  # type: ignore[no-any-return]


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    made = value.numpy() if hasattr(value, "numpy") else value
    if isinstance(made, np.ndarray) and made.dtype != object:
        return made
    raise DataError(
        f"the model can take arrays, and {name} is {type(value).__name__}; inference_fn has to make arrays of it"
    )

"""Prepare TensorFlow in a process: Keras's backend and global settings, threads and devices.

TensorFlow accepts threads and devices only before it runs for the first time in a process. So this module can be
imported without TensorFlow, and its functions are called before anything else of TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spark_elastic.collective.gpu.leases import lease_gpu
from spark_elastic.errors import InvalidSettingsError, MissingExtraError

log = logging.getLogger("spark_elastic.ml")

NEEDED = "tensorflow"
ENV = "KERAS_BACKEND"
_DEVICE = re.compile(r"(cpu|gpu|cuda)(?::(\d+))?$")


def check_backend(user: str) -> None:
    """Raise MissingExtraError or InvalidSettingsError, for the class `user`, unless Keras 3 runs on TensorFlow."""
    try:
        import keras
        import tensorflow  # noqa: F401  (on another backend Keras does not import it)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] not in ("keras", "tensorflow"):
            raise
        raise MissingExtraError(what=user, package=str(error.name), extra="tensorflow") from error
    if keras.__version__.startswith("2."):
        raise InvalidSettingsError(f"{user} needs Keras 3, and Keras {keras.__version__} is installed")
    if keras.backend.backend() != NEEDED:
        raise InvalidSettingsError(
            f"{user} trains Keras models on TensorFlow, and Keras runs on {keras.backend.backend()} here; set "
            f"{ENV}={NEEDED} before keras is imported for the first time"
        )


def prefer_backend() -> None:
    """Choose TensorFlow as backend, unless Keras is imported already or the environment names a backend."""
    if "keras" not in sys.modules:
        os.environ.setdefault(ENV, NEEDED)
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # no lines about the processor in the middle of a transform


def global_config() -> dict[str, Any]:
    """Return the global settings of Keras that layers, losses and initializers depend on."""
    import keras

    return {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.config.dtype_policy().name,
    }


def set_global_config(settings: Mapping[str, Any]) -> None:
    import keras

    for name, value in settings.items():
        getattr(keras.config, f"set_{name}")(value)


def set_threads(count: int) -> None:
    """Set the number of TensorFlow's threads, unless TensorFlow runs already."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(count)


def choose_device(asked: str | None, local_rank: int) -> None:
    """Make one device visible to TensorFlow in a worker, or raise InvalidSettingsError if there is no such device.

    None and "auto" choose a GPU, or the CPU on a host without GPUs. `lease_gpu` chooses among several.
    """
    import tensorflow as tf

    asked = None if asked == "auto" else asked
    gpus = tf.config.list_physical_devices("GPU")
    if asked is None and not gpus:
        return
    name = device_name(asked or "gpu")
    if name.startswith("/CPU"):
        chosen = []
    else:
        given = asked is not None and ":" in asked
        number = int(name.rpartition(":")[2]) if given or len(gpus) < 2 else lease_gpu(len(gpus), local_rank)[0]
        if number >= len(gpus):
            raise InvalidSettingsError(
                f"device={asked!r}, but TensorFlow sees {len(gpus)} GPUs in this worker; let Spark assign GPUs "
                "(spark.task.resource.gpu.amount, docs/gpus.md) and install tensorflow[and-cuda] on the executors, or "
                "train with device='auto' or 'cpu'"
            )
        chosen = [gpus[number]]
    use_gpus(chosen)


def use_gpus(gpus: Sequence[Any]) -> None:
    """Hide other GPUs from TensorFlow, which allocates all of their memory, and share these with other processes."""
    import tensorflow as tf

    try:
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        log.info("TensorFlow runs already, and keeps the devices that it has: %s", error)


def device_name(device: str) -> str:
    """Return TensorFlow's name of "cpu", "gpu", "gpu:1", "cuda", ...; raise InvalidSettingsError for other names."""
    found = _DEVICE.match(device.lower())
    if found is None:
        raise InvalidSettingsError(f"{device!r} is not a device; give 'cpu', 'gpu', 'gpu:1' or the like")
    kind = "CPU" if found[1] == "cpu" else "GPU"
    return f"/{kind}:{found[2] or 0}"

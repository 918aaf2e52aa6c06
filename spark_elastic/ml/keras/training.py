"""The settings of one training of a Keras model, and the preparation of TensorFlow for it in a worker's process.

TensorFlow takes threads and devices only before it runs for the first time in a process. So this module can be imported
without TensorFlow, and its functions are called before anything else of TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_elastic.collective.process import init, local_rank, local_size
from spark_elastic.errors import InvalidSettingsError, MissingExtraError
from spark_elastic.ml.training.engine import host_cores, threads_for
from spark_elastic.ml.training.spec import Training, TrainingResult

if TYPE_CHECKING:
    from spark_elastic.ml.keras.pickling import KerasPickle

log = logging.getLogger("spark_elastic.ml")

NEEDED = "tensorflow"
ENV = "KERAS_BACKEND"
_THREADS_ENV = "TF_NUM_INTRAOP_THREADS"
_DEVICE = re.compile(r"(cpu|gpu|cuda)(?::(\d+))?$")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KerasTraining(Training):
    """One training of a Keras model; `Training` describes the settings that every framework has.

    Attributes:
        model: a built `keras.Model`, without the arguments that it was compiled with.
        compiled: `CompileArguments`. Labels belong to the outputs that have a loss, in the order of the outputs.
        optimizer_values: the values of the optimizer's variables, in their order, if it has done steps already.
        callbacks: a list of this package's callbacks and of `keras.callbacks.Callback`.
        config: global settings of Keras by name, such as "floatx", as they are where the model was made.
    """

    model: KerasPickle
    compiled: KerasPickle
    optimizer_values: Sequence[Any] | None = None
    callbacks: KerasPickle | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def train(training: KerasTraining) -> TrainingResult:
    """Train a Keras model; run it in the workers of a job: `spark_elastic.run(train, (training,))`.

    Outside of a job this process trains alone. When it returns, the trained weights are in `training.store`, in the
    file `engine.MODEL_FILE`. Raises `InvalidSettingsError` or `DataError` if the settings do not go together or with
    the data, and `CheckpointError` if `resume_from` cannot be used.
    """
    prefer_backend()
    check_backend("ElasticKerasEstimator")
    adopt(training.config)
    init()
    # An environment variable has the number of the Spark task's cores, or the user's.
    if training.num_threads is not None or not os.environ.get(_THREADS_ENV):
        set_threads(threads_for(training.num_threads, host_cores(), local_size()))
    _choose_device(training.device, local_rank())
    from spark_elastic.ml.keras.engine import assemble

    return assemble(training).run()


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


def global_config() -> dict[str, Any]:
    """Return the global settings of Keras that layers, losses and initializers depend on, for `adopt`."""
    import keras

    return {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "image_data_format": keras.config.image_data_format(),
        "dtype_policy": keras.config.dtype_policy().name,
    }


def adopt(config: Mapping[str, Any]) -> None:
    """Give this process the global settings of Keras of another one."""
    import keras

    for name, value in config.items():
        getattr(keras.config, f"set_{name}")(value)


def prefer_backend() -> None:
    """Choose TensorFlow as backend, unless Keras is imported already or the environment names a backend."""
    if "keras" not in sys.modules:
        os.environ.setdefault(ENV, NEEDED)
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # no lines about the processor in the middle of a transform


def set_threads(count: int) -> None:
    """Set the number of TensorFlow's threads, unless TensorFlow runs already."""
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(count)


def _choose_device(asked: str | None, local_rank: int) -> None:
    """Make one device visible to TensorFlow in a worker, or raise InvalidSettingsError if there is no such device.

    None and "auto" stand for the GPU of the local rank, or the CPU where there is no GPU.
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
        number = int(name.rpartition(":")[2]) if asked and ":" in asked else local_rank % max(1, len(gpus))
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

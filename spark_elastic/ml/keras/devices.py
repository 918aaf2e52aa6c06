"""What a worker computes with. TensorFlow takes what it is told before it runs first in a process."""

from __future__ import annotations

import logging
import os

import tensorflow as tf

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.keras.predictor import device_name, set_threads
from spark_elastic.ml.training.cores import host_cores, threads_for

log = logging.getLogger("spark_elastic.ml")

_BY_ENVIRONMENT = "TF_NUM_INTRAOP_THREADS"


def choose_threads(asked: int | None, workers: int) -> None:
    """workers: on this host."""
    if asked is None and os.environ.get(_BY_ENVIRONMENT):
        return  # the cores of the Spark task, or what the user has set
    set_threads(threads_for(asked, host_cores(), workers))


def choose_device(asked: str | None, local_rank: int) -> None:
    """Raises: InvalidSettingsError: there is no such device here."""
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
                f"device={asked!r}, but TensorFlow sees {len(gpus)} GPUs in this worker; have Spark hand them out "
                "(spark.task.resource.gpu.amount, docs/gpus.md) and install tensorflow[and-cuda] on the executors, or "
                "train with device='auto' or 'cpu'"
            )
        chosen = [gpus[number]]
    try:
        tf.config.set_visible_devices(chosen, "GPU")
        for gpu in chosen:
            tf.config.experimental.set_memory_growth(gpu, True)  # others may share it
    except RuntimeError as error:
        log.info("TensorFlow runs already, and keeps the devices that it has: %s", error)

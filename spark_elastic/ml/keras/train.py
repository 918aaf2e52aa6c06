"""Train a Keras model in a worker: prepare TensorFlow, and then import what needs it."""

from __future__ import annotations

import os

from spark_elastic.collective.process import init, local_rank, local_size
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.ml.keras.tensorflow_setup import (
    check_backend,
    choose_device,
    prefer_backend,
    set_global_config,
    set_threads,
)
from spark_elastic.ml.training.engine import host_cores, threads_for
from spark_elastic.ml.training.spec import TrainingResult

_THREADS_ENV = "TF_NUM_INTRAOP_THREADS"


def train(training: KerasTraining) -> TrainingResult:
    """Train a Keras model, as `ml.torch.train.train` trains a module; the weights are in the file `spec.MODEL_FILE`."""
    prefer_backend()
    check_backend("ElasticKerasEstimator")
    set_global_config(training.config)
    init()
    # An environment variable has the number of the Spark task's cores, or the user's.
    if training.num_threads is not None or not os.environ.get(_THREADS_ENV):
        set_threads(threads_for(training.num_threads, host_cores(), local_size()))
    choose_device(training.device, local_rank())
    from spark_elastic.ml.keras.engine import assemble

    return assemble(training).run()

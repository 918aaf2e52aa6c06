"""The training of a Keras model, as it runs in every worker. Nothing of TensorFlow is imported before it runs."""

from __future__ import annotations

from spark_elastic.collective.process import init
from spark_elastic.ml.keras.backend import check_backend, prefer_backend
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.ml.training.spec import TrainingResult


def train(training: KerasTraining) -> TrainingResult:
    """Do a training; to be run in the workers of a job, `spark_elastic.run(train, (training,))`.

    The trained weights lie in `training.store` as `spec.MODEL_FILE` when this returns. Outside of a job it is done in
    this process alone.

    Raises:
        InvalidSettingsError, DataError: model, losses, metrics, optimizer and data do not fit together.
        CheckpointError: `resume_from` cannot be used.
    """
    prefer_backend()
    check_backend("ElasticKerasEstimator")
    init()
    from spark_elastic.ml.keras.assembly import assemble

    return assemble(training).run()

"""The training itself, as it runs in every worker."""

from __future__ import annotations

from spark_elastic.ml.torch.spec import TorchTraining, TrainingResult


def train(training: TorchTraining) -> TrainingResult:
    """Do a training; to be run in the workers of a job, `spark_elastic.run(train, (training,))`.

    The trained model lies in `training.store` as `spec.MODEL_FILE` when this returns.
    """
    raise NotImplementedError

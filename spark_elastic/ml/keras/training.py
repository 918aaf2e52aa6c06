"""The settings of one training of a Keras model, and how a worker trains with them.

A worker imports this module before TensorFlow, which takes threads and device only before it runs for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.collective.process import init, local_rank, local_size
from spark_elastic.ml.keras.runtime import check_backend, choose_device, choose_threads, prefer_backend
from spark_elastic.ml.training.spec import Training, TrainingResult

if TYPE_CHECKING:
    from spark_elastic.ml.keras.pickling import KerasPickle


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KerasTraining(Training):
    """One training of a Keras model; `Training` describes the settings that every framework has.

    Attributes:
        model: a built `keras.Model`, without the arguments that it was compiled with.
        compiled: `CompileArguments`. Labels belong to the outputs that have a loss, in the order of the outputs.
        optimizer_values: the values of the variables of an optimizer that has done steps already, in their order. None:
            a new optimizer.
        callbacks: a list of our callbacks and of `keras.callbacks.Callback`, which run in every worker in this order;
            those of Keras that write files run on rank 0 only, see `ml.keras.callbacks`.
        device: "cpu", "gpu" (the GPU of the local rank), "gpu:1", ... None: a GPU where there is one.
    """

    model: KerasPickle
    compiled: KerasPickle
    optimizer_values: Sequence[Any] | None = None
    callbacks: KerasPickle | None = None


def train(training: KerasTraining) -> TrainingResult:
    """Train a Keras model; run it in the workers of a job: `spark_elastic.run(train, (training,))`.

    Outside of a job this process trains alone. When it returns, the trained weights are in `training.store`, in the
    file `engine.MODEL_FILE`.

    Raises:
        InvalidSettingsError: model, losses, metrics and optimizer do not go together.
        DataError: they do not go with the data.
        CheckpointError: `resume_from` cannot be used.
    """
    prefer_backend()
    check_backend("ElasticKerasEstimator")
    init()
    choose_threads(training.num_threads, local_size())
    choose_device(training.device, local_rank())
    from spark_elastic.ml.keras.assembly import assemble

    return assemble(training).run()

"""Everything that a worker needs to know of the training of a Keras model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.ml.training.spec import Training

if TYPE_CHECKING:
    from spark_elastic.ml.keras.pickling import Sealed

MODEL_FILE = "model.weights.npz"
"""In the run's store: the weights of the trained model, for `weights.fill`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KerasTraining(Training):
    """One training of a Keras model. What is not said here is said in `Training`.

    model: a built `keras.Model`, which does not come back compiled.
    compiled: `CompileArguments`. Labels belong to the outputs that have a loss, in the order of the outputs.
    optimizer_values: of the variables of an optimizer that was in use already, in their order; None: it begins anew.
    callbacks: a list of ours and of `keras.callbacks.Callback`, which run in every worker, in this order; those of
        Keras that write files run where the rank is 0, see `callbacks`. None: none.
    device: "cpu", "gpu" (that of the local rank), "gpu:1", ... None: a GPU where there is one.
    """

    model: Sealed
    compiled: Sealed
    optimizer_values: Sequence[Any] | None = None
    callbacks: Sealed | None = None

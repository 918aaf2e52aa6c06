"""The steps and measurements of a Keras model: the `Engine` of `ml.training.engine`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.collective.operations import allreduce_
from spark_elastic.collective.reduction import Sum
from spark_elastic.data.order.permutation import derived_key
from spark_elastic.data.reader import Batch
from spark_elastic.errors import CheckpointError
from spark_elastic.keras import backend as values
from spark_elastic.keras.sync_batch_normalization import is_synchronised
from spark_elastic.ml.keras.callbacks import KerasCallbacks
from spark_elastic.ml.keras.feeding import BatchFeeder, BatchPart, KerasBatch
from spark_elastic.ml.keras.metrics import KerasMetricAccumulator
from spark_elastic.ml.keras.objective import Shares
from spark_elastic.ml.keras.serialization import (
    arrays_from_bytes,
    arrays_to_bytes,
    assign,
    named_values,
    weights_to_bytes,
)
from spark_elastic.ml.keras.steps import StepGraphs
from spark_elastic.ml.training.engine import FrameworkEngine, Measured
from spark_elastic.ml.training.progress import Piece, Progress, Sums
from spark_elastic.ml.training.spec import Training
from spark_elastic.tensorflow.host import lost_peers_translated

ARRAYS = "state.npz"
"""The file of a checkpoint with all arrays."""
MODEL_FILE = "model.weights.npz"
"""The file in the run's store with the weights of the trained model, for `serialization.fill`."""


class KerasEngine(FrameworkEngine):
    """The steps and measurements of one Keras model; `assembly.assemble` puts it together.

    Args:
        training: the settings.
        model: the compiled model.
        best: a copy of the model for the weights of the best epoch.
        feeder: the converter of batches.
        metrics: the accumulator of losses and metrics.
        graphs: the graphs of a step.
        buffers: the variables that a forward pass changes: running means and the like.
        callbacks: all callbacks of the training.
        by_weight: whether losses are divided by the sum of the batch's sample weights, which is then reduced first.
    """

    gathers = False

    def __init__(
        self,
        training: Training,
        *,
        model: Any,
        best: Any,
        feeder: BatchFeeder,
        metrics: KerasMetricAccumulator,
        graphs: StepGraphs,
        buffers: Sequence[Any],
        callbacks: KerasCallbacks,
        by_weight: bool,
    ) -> None:
        super().__init__(training, model, best, metrics)
        self._feeder = feeder
        self._accumulator = metrics
        self._graphs = graphs
        self._buffers = list(buffers)
        self._callbacks = callbacks
        self._by_weight = by_weight
        self._synchronised = is_synchronised(model)
        self._stepping = False
        """A step has begun and not ended; if its collective fails, `put_back` must undo it."""
        self.stepped: Callable[[], None] = lambda: None
        """A function that is called after each step."""

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def use_threads(self, count: int) -> None:
        """Do nothing: TensorFlow takes the number of threads only before it runs for the first time."""

    def feed(self, batches: Generator[Batch]) -> Generator[KerasBatch]:
        return self._feeder.batches(batches)

    # --- steps ------------------------------------------------------------------------------------

    def step(self, batch: KerasBatch, at: Progress, stop: bool) -> Measured:
        with lost_peers_translated():
            shares = self._shares(batch)
            # two positive numbers below 2**31, which every type of seed can hold
            key = derived_key(self._training.seed, at.epoch, batch.start, self._rank)
            self._stepping = True
            halves = [key & 0x3FFFFFFF, key >> 34]
            numbers = self._graphs.step(batch.parts, shares, halves, stop, self._stand_ins(batch)).numpy()
            self._stepping = False
        self.stepped()
        return Measured(numbers[:-1], (), bool(numbers[-1]))

    def _stand_ins(self, batch: KerasBatch) -> list[BatchPart]:
        """Return a row for each pass that other workers make and this one has no rows for.

        Synchronised layers have collectives in their passes, so every worker must make the same number of them.
        """
        if self._size == 1 or not self._synchronised:
            return []
        passes = min(self._training.accumulation, -(-batch.global_rows // self._size))
        return [self._feeder.stand_in()] * (passes - len(batch.parts))

    def put_back(self) -> None:
        """Undo a step whose collective failed; it will be repeated."""
        if self._stepping:
            self._stepping = False
            self._graphs.put_back()

    def _shares(self, batch: KerasBatch) -> list[Shares]:
        """Return the shares of each part; raise HorovodInternalError if the reduction of the weights fails."""
        shares = [Shares(part.rows / batch.global_rows) for part in batch.parts]
        if self._by_weight:
            own = [float(tf.reduce_sum(tf.cast(part.tensors[-1], tf.float64))) for part in batch.parts]
            total = allreduce_(torch.tensor([sum(own)], dtype=torch.float64), op=Sum).item()
            for share, weight in zip(shares, own, strict=True):
                share.weight = weight / total if total else 0.0
        return shares

    # --- measurements -----------------------------------------------------------------------------

    def measure(self, batches: Iterable[KerasBatch]) -> tuple[Sums, list[Piece]]:
        self._graphs.reset()
        rows = 0
        returned = np.zeros(len(self._accumulator.returned["val_"]))
        for batch in batches:
            for part in batch.parts:
                share = part.rows / batch.global_rows
                with self._callbacks.test_batch(batch.start // batch.global_rows):
                    returned = returned + self._graphs.evaluate(part, Shares(share, share)).numpy()
                rows += part.rows
        return np.concatenate([self._graphs.read().numpy(), returned, [float(rows)]]), []

    def share_buffers(self) -> None:
        if self._size < 2 or not self._buffers:
            return
        if self._rank == 0:
            broadcast_tensors([values.to_wire(each) for each in self._buffers], 0)
            return
        sizes = [values.bytes_of(values.describe(each)) for each in self._buffers]
        wires = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        broadcast_tensors(wires, 0)
        for variable, wire in zip(self._buffers, wires, strict=True):
            values.from_wire(variable, wire)

    def has_local_non_finite_loss(self) -> bool:
        return (
            self._metrics.non_finite_loss(self._graphs.read().numpy()) is not None
        )  # the metrics hold this worker's last step

    def has_nan(self) -> bool:
        return any(_has_nan(each.numpy()) for each in self.model.trainable_variables)

    # --- ends -------------------------------------------------------------------------------------

    def after_callbacks(self) -> None:
        self._callbacks.agree(self._rank, self._size)

    def keep_best(self) -> None:
        _copy(self.model, self.best)

    def use_best(self) -> None:
        _copy(self.best, self.model)

    def finish(self) -> None:
        # the averages of an optimizer with use_ema=True become the weights, as at the end of `model.fit`
        self.optimizer.finalize_variable_values(self.model.trainable_variables)

    def model_file(self) -> tuple[str, bytes]:
        return MODEL_FILE, weights_to_bytes(self.model)

    def copies(self, at: Progress) -> Callable[[], dict[str, bytes]]:
        copied = {
            **named_values(self.model.variables, "model/"),
            **named_values(self.optimizer.variables, "optimizer/"),
            **{f"callbacks/{name}": array for name, array in self._callbacks.arrays().items()},
        }
        if self.best is not None and at.best_epoch is not None:
            copied |= named_values(self.best.variables, "best/")
        trained = {id(each) for each in self.model.trainable_variables}
        named = zip((name for name in copied if name.startswith("model/")), self.model.variables, strict=True)
        names = () if self._training.allow_nan_loss else tuple(name for name, each in named if id(each) in trained)

        def encode() -> dict[str, bytes]:
            for name in names:
                if _has_nan(copied[name]):  # the next step's loss will be NaN too and end the training
                    raise CheckpointError(f"{name} is NaN after step {at.step}")
            return {ARRAYS: arrays_to_bytes(copied)}

        return encode

    def load(self, files: Mapping[str, bytes]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        found = arrays_from_bytes(files[ARRAYS])
        assign(self.model.variables, found, "model/")
        assign(self.optimizer.variables, found, "optimizer/")
        if self.best is not None and any(name.startswith("best/") for name in found):
            assign(self.best.variables, found, "best/")
        of_callbacks = {name[10:]: array for name, array in found.items() if name.startswith("callbacks/")}
        self._callbacks.take_arrays(of_callbacks)
        return (), ()


def _has_nan(array: Any) -> bool:
    return array.dtype.kind not in "biu" and bool((array != array).any())


def _copy(source: Any, target: Any) -> None:
    values.put_back(target.variables, values.copies_of(source.variables))

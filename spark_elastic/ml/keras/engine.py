"""The steps and measurements of a Keras model: `training.engine.Engine`."""

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
from spark_elastic.keras import variables as values
from spark_elastic.keras.sync_batch_normalization import is_synchronised
from spark_elastic.ml.keras import weights
from spark_elastic.ml.keras.callbacks import KerasCallbacks
from spark_elastic.ml.keras.feeding import Feeding, KerasBatch, Part
from spark_elastic.ml.keras.metrics import MetricSums
from spark_elastic.ml.keras.objective import Shares
from spark_elastic.ml.keras.spec import MODEL_FILE, KerasTraining
from spark_elastic.ml.keras.steps import Steps
from spark_elastic.ml.keras.weights import dump_arrays, load_arrays
from spark_elastic.ml.training.engine import Measured
from spark_elastic.ml.training.progress import Piece, Progress, Sums
from spark_elastic.tensorflow.host import translated

ARRAYS = "state.npz"


class KerasEngine:
    """See `training.train` for how it is put together.

    best: a copy of the model for the weights of the best epoch. by_weight: whether the sum of a batch's sample weights
    has to be known before its losses are.
    """

    gathers = False

    def __init__(
        self,
        training: KerasTraining,
        *,
        model: Any,
        best: Any,
        feeding: Feeding,
        sums: MetricSums,
        steps: Steps,
        buffers: Sequence[Any],
        callbacks: KerasCallbacks,
        by_weight: bool,
    ) -> None:
        self.model = model
        self.best = best
        self._training = training
        self._feeding = feeding
        self._sums = sums
        self._steps = steps
        self._buffers = list(buffers)
        self._callbacks = callbacks
        self._by_weight = by_weight
        self._synchronised = is_synchronised(model)
        self._rank, self._size = 0, 1
        self._stepping = False
        """A step has begun and not ended: if it does not end, it has changed what only `put_back` undoes."""
        self.stepped: Callable[[], None] = lambda: None
        """Called after each step."""

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer

    @property
    def keeps_best(self) -> bool:
        return self.best is not None

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def enter(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def use_threads(self, count: int) -> None:
        """TensorFlow has as many as it was told before it ran first."""

    def feed(self, batches: Generator[Batch]) -> Generator[KerasBatch]:
        return self._feeding.batches(batches)

    # --- steps ------------------------------------------------------------------------------------

    def begin_steps(self) -> None: ...

    def step(self, batch: KerasBatch, at: Progress, stop: bool) -> Measured:
        with translated():
            shares = self._shares(batch)
            # in turns positive numbers of 31 bits, which every type of seeds can hold
            key = derived_key(self._training.seed, at.epoch, batch.start, self._rank)
            self._stepping = True
            in_halves = [key & 0x3FFFFFFF, key >> 34]
            numbers = self._steps.step(batch.parts, shares, in_halves, stop, self._stand_ins(batch)).numpy()
            self._stepping = False
        self.stepped()
        return Measured(numbers[:-1], (), bool(numbers[-1]))

    def _stand_ins(self, batch: KerasBatch) -> list[Part]:
        """Return a row for each pass that others make and this worker has no rows for, where layers wait for that."""
        if self._size == 1 or not self._synchronised:
            return []
        passes = min(self._training.accumulation, -(-batch.global_rows // self._size))
        return [self._feeding.stand_in()] * (passes - len(batch.parts))

    def put_back(self) -> None:
        """A collective has failed: a step that was begun is going to be done again."""
        if self._stepping:
            self._stepping = False
            self._steps.put_back()

    def _shares(self, batch: KerasBatch) -> list[Shares]:
        """Of the parts of a batch. Raises: HorovodInternalError."""
        shares = [Shares(part.rows / batch.global_rows) for part in batch.parts]
        if self._by_weight:
            own = [float(tf.reduce_sum(tf.cast(part.tensors[-1], tf.float64))) for part in batch.parts]
            total = allreduce_(torch.tensor([sum(own)], dtype=torch.float64), op=Sum).item()
            for share, weight in zip(shares, own, strict=True):
                share.weight = weight / total if total else 0.0
        return shares

    # --- measurements -----------------------------------------------------------------------------

    def begin_validation(self) -> None: ...

    def measure(self, batches: Iterable[KerasBatch]) -> tuple[Sums, list[Piece]]:
        self._steps.reset()
        rows = 0
        returned = np.zeros(len(self._sums.returned["val_"]))
        for batch in batches:
            for part in batch.parts:
                share = part.rows / batch.global_rows
                with self._callbacks.test_batch(batch.start // batch.global_rows):
                    returned = returned + self._steps.evaluate(part, Shares(share, share)).numpy()
                rows += part.rows
        return np.concatenate([self._steps.read().numpy(), returned, [float(rows)]]), []

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

    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        return self._sums.logs(sums, prefix)

    def rows(self, sums: Sums) -> int:
        return self._sums.rows(sums)

    def non_finite_loss(self, sums: Sums) -> float | None:
        return self._sums.lost(sums)

    def has_local_non_finite_loss(self) -> bool:
        return self._sums.lost(self._steps.read().numpy()) is not None  # a step leaves its own rows in the metrics

    def has_nan(self) -> bool:
        return any(_has_nan(each.numpy()) for each in self.model.trainable_variables)

    def live_logs(self, sums: Sums) -> dict[str, float]:
        return self._sums.told(sums)

    # --- ends -------------------------------------------------------------------------------------

    def after_epoch(self, row: Mapping[str, float]) -> None: ...

    def after_callbacks(self) -> None:
        self._callbacks.agree(self._rank, self._size)

    def keep_best(self) -> None:
        _copy(self.model, self.best)

    def use_best(self) -> None:
        _copy(self.best, self.model)

    def finish(self) -> None:
        # averages of weights that an optimizer keeps become the weights, as at the end of `model.fit`
        self.optimizer.finalize_variable_values(self.model.trainable_variables)

    def model_file(self) -> tuple[str, bytes]:
        return MODEL_FILE, weights.dumps(self.model)

    def copies(self, at: Progress) -> Callable[[], dict[str, bytes]]:
        copied = {
            **weights.named(self.model.variables, "model/"),
            **weights.named(self.optimizer.variables, "optimizer/"),
            **{f"callbacks/{name}": array for name, array in self._callbacks.arrays().items()},
        }
        if self.best is not None and at.best_epoch is not None:
            copied |= weights.named(self.best.variables, "best/")
        trained = {id(each) for each in self.model.trainable_variables}
        named = zip((name for name in copied if name.startswith("model/")), self.model.variables, strict=True)
        names = () if self._training.allow_nan_loss else tuple(name for name, each in named if id(each) in trained)

        def made() -> dict[str, bytes]:
            for name in names:
                if _has_nan(copied[name]):  # the loss of the next step will be, and end the training
                    raise CheckpointError(f"{name} is NaN after step {at.step}")
            return {ARRAYS: dump_arrays(copied)}

        return made

    def load(self, files: Mapping[str, bytes]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        found = load_arrays(files[ARRAYS])
        weights.assign(self.model.variables, found, "model/")
        weights.assign(self.optimizer.variables, found, "optimizer/")
        if self.best is not None and any(name.startswith("best/") for name in found):
            weights.assign(self.best.variables, found, "best/")
        of_callbacks = {name[10:]: array for name, array in found.items() if name.startswith("callbacks/")}
        self._callbacks.take_arrays(of_callbacks)
        return (), ()

    def close(self) -> None: ...


def _has_nan(array: Any) -> bool:
    return array.dtype.kind not in "biu" and bool((array != array).any())


def _copy(source: Any, target: Any) -> None:
    values.put_back(target.variables, values.copies_of(source.variables))

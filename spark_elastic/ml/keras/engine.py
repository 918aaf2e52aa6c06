"""Training a Keras model in a worker: its steps, its measurements, and putting the trainer together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.collective.operations import allreduce_
from spark_elastic.collective.operators import Sum
from spark_elastic.data.order.permutation import derived_key
from spark_elastic.data.reader import Batch
from spark_elastic.elastic.handlers import Handlers, StateHandler
from spark_elastic.elastic.mark import OptimizerSteps, StepCounter
from spark_elastic.errors import CheckpointError
from spark_elastic.keras import backend as values
from spark_elastic.keras.elastic.handlers import handler_for
from spark_elastic.keras.sync_batch_normalization import convert
from spark_elastic.ml.callbacks import check_one_best
from spark_elastic.ml.keras import serialization
from spark_elastic.ml.keras.callbacks import KerasCallbacks, adapt_callbacks
from spark_elastic.ml.keras.compiling import CompileArguments, build_optimizer
from spark_elastic.ml.keras.feeding import FIRST_ROWS, BatchFeeder
from spark_elastic.ml.keras.metrics import (
    KerasMetricAccumulator,
    complete_losses,
    count_by_row,
    weigh_means_by_row,
)
from spark_elastic.ml.keras.objective import Shares, number_terms
from spark_elastic.ml.keras.spec import MODEL_FILE, KerasTraining
from spark_elastic.ml.keras.steps import StepGraphs, buffers_of, part_arguments, seeds_of
from spark_elastic.ml.training.engine import Engine, Measured, first_rows
from spark_elastic.ml.training.spec import Piece, Progress, Sums
from spark_elastic.ml.training.trainer import Trainer
from spark_elastic.tensorflow.host import lost_peers_translated

ARRAYS = "state.npz"  # the file of a checkpoint with all arrays


class PreparedModel(NamedTuple):
    """A compiled model that is ready for its first step; `averaged` are metric functions that return one number."""

    model: Any
    compiled: CompileArguments
    feeder: BatchFeeder
    metrics: KerasMetricAccumulator
    graphs: StepGraphs
    shares: Shares
    averaged: list[str]


def prepare(training: KerasTraining) -> PreparedModel:
    """Compile the model and trace its step; raise as `training.train` does."""
    model, compiled = training.model.load(), training.compiled.load()
    if training.sync_batch_norm:
        convert(model)
    shares = Shares()
    averaged: list[str] = []
    by_row = count_by_row(complete_losses(compiled, model), shares, averaged)
    model.compile(
        **{field.name: getattr(by_row, field.name) for field in fields(by_row)},
        jit_compile=False,  # the reduction calls Python, which XLA cannot
        auto_scale_loss=False,  # `compile_arguments` has done so
    )
    # a callback that saves the model writes the losses that were given
    model._compile_config.config["loss"] = compiled.loss
    feeder = BatchFeeder(training, model, compiled)
    _build(model, feeder, training, shares)
    number_terms(model, shares)
    weigh_means_by_row(model, shares)
    build_optimizer(model, training.optimizer_values)
    metrics = KerasMetricAccumulator(model)
    graphs = StepGraphs(training, model, feeder, metrics, shares)
    return PreparedModel(model, compiled, feeder, metrics, graphs, shares, averaged)


def _build(model: Any, feeder: BatchFeeder, training: KerasTraining, shares: Shares) -> None:
    """Call the model with some rows, and create the variables of its metrics; the losses themselves are not called."""
    (rows,) = feeder.arrays(first_rows(training, FIRST_ROWS), parts=1)
    x, y, weights = (*feeder.structure(tuple(map(tf.constant, rows))), None)[:3]
    state = [*buffers_of(model), *seeds_of(model)]
    before = [each.numpy() for each in state]
    y_pred = model(x)
    shares.building = True
    if model._compile_loss is not None or model.losses:
        model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)
    shares.building = False
    model.compute_metrics(x, y, y_pred, sample_weight=weights)
    for variable, value in zip(state, before, strict=True):
        variable.assign(value)


class KerasEngine(Engine):
    """The `Engine` of one Keras model; `best` is a copy of the model for the weights of the best epoch, or None."""

    metrics: KerasMetricAccumulator
    memory_errors = (*Engine.memory_errors, tf.errors.ResourceExhaustedError)

    def __init__(self, training: KerasTraining, ready: PreparedModel, best: Any, callbacks: KerasCallbacks) -> None:
        super().__init__(training, ready.model, ready.model.optimizer, best, ready.metrics)
        norms = (each for each in ready.model._flatten_layers() if isinstance(each, keras.layers.BatchNormalization))
        self.has_own_statistics = any(not hasattr(each, "_members") for each in norms)
        self._feeder = ready.feeder
        self._graphs = ready.graphs
        self.callbacks = callbacks
        self._stepping = False  # a step has begun and not ended; if its collective fails, `undo_step` must undo it
        self.stepped: Callable[[], None] = lambda: None  # a function that is called after each step

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def use_threads(self, count: int) -> None:
        """Do nothing: the number of TensorFlow's threads cannot change once TensorFlow has run."""

    def step(self, batch: Batch, at: Progress, stop: bool) -> Measured:
        parts, uncounted = self._feeder.parts(batch), []
        if self._size > 1:
            # Every worker makes the same number of passes, some with a row that does not count: layers may have a
            # state that each pass changes, and synchronised layers have collectives.
            uncounted = [self._feeder.first_row] * (self._passes(batch.global_rows) - len(parts))
        # two positive numbers below 2**31, which every type of seed can hold
        key = derived_key(self._training.seed, at.epoch, batch.start, self._rank)
        of_step = tf.constant([key & 0x3FFFFFFF, key >> 34, *self._votes(stop)], tf.int64)
        with lost_peers_translated():
            totals = self._totals(parts)
            self._stepping = True
            numbers = self._graphs.step(parts, uncounted, batch.global_rows, totals, of_step).numpy()
            self._stepping = False
        self.stepped()
        return self._measured(numbers)

    def undo_step(self) -> None:
        if self._stepping:
            self._stepping = False
            self._graphs.undo_step()

    def _totals(self, parts: Sequence[Any]) -> list[float]:
        """Return the denominators of the losses in the whole batch; those that are counted are reduced."""
        return self._graphs.totals(parts, lambda own: allreduce_(own, op=Sum))

    def measure(self, batches: Iterable[Batch]) -> tuple[Sums, list[Piece]]:
        self._graphs.reset()
        rows = 0
        returned = np.zeros(len(self.metrics.returned["val_"]))
        for batch in batches:
            parts = self._feeder.parts(batch)
            totals = self._totals(parts)
            for part in parts:
                with self.callbacks.test_batch(batch.start // batch.global_rows):
                    returned += self._graphs.evaluate(*part_arguments(part, batch.global_rows, totals)).numpy()
            rows += batch.rows
        return np.concatenate([self._graphs.read().numpy(), returned, [float(rows)]]), []

    def share_buffers(self) -> None:
        buffers = self._graphs.buffers
        if self._size < 2 or not buffers:
            return
        wires = [values.to_wire(each) for each in buffers]
        broadcast_tensors(wires, 0)
        for variable, wire in zip(buffers, wires, strict=True) if self._rank else ():
            values.from_wire(variable, wire)

    def has_local_non_finite_loss(self) -> bool:
        sums = self._graphs.read().numpy()  # of this worker's last step
        return self.metrics.non_finite_loss(sums) is not None

    def has_nan(self) -> bool:
        return any(_has_nan(each.numpy()) for each in self.model.trainable_variables)

    def after_callbacks(self) -> None:
        self.callbacks.agree(self._rank, self._size)

    def copy_weights(self, source: Any, target: Any) -> None:
        values.restore_values(target.variables, values.copy_values(source.variables))

    def finish(self) -> None:
        # the averages of an optimizer with use_ema=True become the weights, as at the end of `model.fit`
        self.optimizer.finalize_variable_values(self.model.trainable_variables)

    def model_file(self) -> tuple[str, bytes]:
        return MODEL_FILE, serialization.weights_to_bytes(self.model)

    def copies(self, at: Progress) -> Callable[[], dict[str, bytes]]:
        copied = {
            **serialization.named_values(self.model.variables, "model/"),
            **serialization.named_values(self.optimizer.variables, "optimizer/"),
            **{f"callbacks/{name}": array for name, array in self.callbacks.arrays().items()},
        }
        if self.best is not None and at.best_epoch is not None:
            copied |= serialization.named_values(self.best.variables, "best/")
        trained = {id(each) for each in self.model.trainable_variables}
        named = zip((name for name in copied if name.startswith("model/")), self.model.variables, strict=True)
        names = () if self._training.allow_nan_loss else tuple(name for name, each in named if id(each) in trained)

        def encode() -> dict[str, bytes]:
            for name in names:
                if _has_nan(copied[name]):  # the next step's loss will be NaN too and end the training
                    raise CheckpointError(f"{name} is NaN after step {at.step}")
            return {ARRAYS: serialization.arrays_to_bytes(copied)}

        return encode

    def load(self, files: Mapping[str, bytes]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        found = serialization.arrays_from_bytes(files[ARRAYS])
        serialization.assign(self.model.variables, found, "model/")
        serialization.assign(self.optimizer.variables, found, "optimizer/")
        if self.best is not None and any(name.startswith("best/") for name in found):
            serialization.assign(self.best.variables, found, "best/")
        of_callbacks = {name[10:]: array for name, array in found.items() if name.startswith("callbacks/")}
        self.callbacks.load_arrays(of_callbacks)
        return (), ()


def _has_nan(array: Any) -> bool:
    return array.dtype.kind not in "biu" and bool((array != array).any())


class EngineSteps(OptimizerSteps):
    """Counts the steps of an engine for the elastic state, and undoes what an unfinished step has changed."""

    def __init__(self, engine: KerasEngine, handlers: Handlers, counter: StepCounter) -> None:
        super().__init__(handlers, counter)
        self._engine = engine
        counter.steps["optimizer"] = 0
        engine.stepped = lambda: counter.stepped("optimizer")

    def undo(self, plain: dict[str, Any]) -> str:
        self._engine.undo_step()
        return super().undo(plain)


def assemble(training: KerasTraining) -> Trainer:
    ready = prepare(training)
    given = training.callbacks.load() if training.callbacks is not None else []
    callbacks = [*adapt_callbacks(given, training, ready.model), *training.plan_callbacks()]
    check_one_best(callbacks)
    best = training.model.load() if any(callback.restores_best for callback in callbacks) else None
    states = KerasCallbacks(callbacks, ready.model)
    engine = KerasEngine(training, ready, best, states)

    def handler_of(value: Any) -> StateHandler | None:
        return handler_for(value, lambda: {"model": engine.model})

    return Trainer(training, engine, callbacks, states, handler_of, partial(EngineSteps, engine))

"""Put the parts of a Keras model's training together in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from spark_elastic.elastic.handlers import Handlers, StateHandler
from spark_elastic.elastic.steps import LoopWatch, OptimizerSteps, Recovery, StepCounter
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.keras.elastic.handlers import handler_for
from spark_elastic.keras.sync_batch_normalization import convert
from spark_elastic.ml.callbacks import check_one_best
from spark_elastic.ml.keras.callbacks import KerasCallbacks, adapt_callbacks
from spark_elastic.ml.keras.compiling import CompileArguments
from spark_elastic.ml.keras.engine import KerasEngine
from spark_elastic.ml.keras.feeding import FIRST_ROWS, BatchFeeder
from spark_elastic.ml.keras.metrics import KerasMetricAccumulator
from spark_elastic.ml.keras.objective import (
    Shares,
    complete_losses,
    count_losses_by_row,
    count_metrics_by_row,
    divides_by_weights,
    scale_losses,
)
from spark_elastic.ml.keras.steps import StepGraphs
from spark_elastic.ml.preparation import WEIGHT
from spark_elastic.ml.training.engine import TrainingState, first_rows
from spark_elastic.ml.training.progress import Progress
from spark_elastic.ml.training.saving import CheckpointSchedule
from spark_elastic.ml.training.trainer import Trainer

if TYPE_CHECKING:
    from spark_elastic.ml.keras.training import KerasTraining


class EngineSteps(OptimizerSteps):
    """The steps of an engine, which reports each and puts back what an unfinished one has changed."""

    def __init__(self, engine: KerasEngine, handlers: Handlers, counter: StepCounter, watch: LoopWatch) -> None:
        super().__init__(handlers, counter, watch)
        self._engine = engine
        counter.steps["optimizer"] = 0
        engine.stepped = lambda: counter.stepped("optimizer")

    def undo_step(self, choice: Recovery) -> None:
        self._engine.put_back()


def state_of(engine: KerasEngine, *, callbacks: KerasCallbacks, at: Progress) -> TrainingState:
    """Return the state of a training: model, optimizer, best weights, callbacks' memories, and its progress."""

    def handler_of(value: Any) -> StateHandler | None:
        return handler_for(value, lambda: {"model": engine.model})

    values = {
        "model": engine.model,
        "optimizer": engine.optimizer,
        "best": engine.best,
        "callbacks": callbacks,
        "at": at,
    }
    return TrainingState(handler_of, LoopWatch, partial(EngineSteps, engine), values)


class PreparedModel(NamedTuple):
    """A compiled model that is ready for its first step, and the parts of the step.

    Attributes:
        model: the model, with all variables that it will ever have.
        compiled: the arguments of `compile` that the user gave.
        feeder: the converter of batches.
        metrics: the accumulator of losses and metrics.
        graphs: the graphs of a step.
        buffers: the variables that a forward pass changes: running means and the like.
        averaged: the metrics that are functions and return one number for all rows.
    """

    model: Any
    compiled: CompileArguments
    feeder: BatchFeeder
    metrics: KerasMetricAccumulator
    graphs: StepGraphs
    buffers: list[Any]
    averaged: list[str]


def prepare(training: KerasTraining) -> PreparedModel:
    """Compile the model and trace its step.

    Raises:
        InvalidSettingsError: model, losses, metrics and optimizer do not go together.
        DataError: they do not go with the data.
    """
    model, compiled = training.model.load(), training.compiled.load()
    if training.sync_batch_norm:
        convert(model)
    shares = Shares()
    weighted = any(field.name == WEIGHT for field in training.dataset.layout.fields)
    averaged: list[str] = []
    exact = count_metrics_by_row(scale_losses(complete_losses(compiled, model), shares, weighted), averaged)
    model.compile(
        optimizer=exact.optimizer,
        loss=exact.loss,
        loss_weights=exact.loss_weights,
        metrics=exact.metrics,
        weighted_metrics=exact.weighted_metrics,
        jit_compile=False,  # the reduction calls Python, which XLA cannot
    )
    feeder = BatchFeeder(training, model, compiled)
    _create_metric_variables(model, feeder, training)
    count_losses_by_row(model, shares)
    _build_optimizer(model, training.optimizer_values)
    metrics = KerasMetricAccumulator(model)
    buffers = buffers_of(model)
    graphs = StepGraphs(
        training,
        model=model,
        feeder=feeder,
        metrics=metrics,
        shares=shares,
        buffers=buffers,
        seeds=seeds_of(model),
    )
    return PreparedModel(model, compiled, feeder, metrics, graphs, buffers, averaged)


def assemble(training: KerasTraining) -> Trainer:
    """Build the trainer of this worker; raise as `training.train` does."""
    model, compiled, feeder, metrics, graphs, buffers, _ = prepare(training)
    given = training.callbacks.load() if training.callbacks is not None else []
    callbacks = [*adapt_callbacks(given, training, model), *training.plan_callbacks()]
    check_one_best(callbacks)
    all_callbacks = KerasCallbacks(callbacks, model)
    best = training.model.load() if any(callback.restores_best for callback in callbacks) else None
    engine = KerasEngine(
        training,
        model=model,
        best=best,
        feeder=feeder,
        metrics=metrics,
        graphs=graphs,
        buffers=buffers,
        callbacks=all_callbacks,
        by_weight=WEIGHT in feeder.names and divides_by_weights(compiled),
    )
    checkpoints = CheckpointSchedule(training, engine, callbacks, metrics.names)
    at = checkpoints.first_progress()
    state = state_of(engine, callbacks=all_callbacks, at=at)
    return Trainer(training, engine=engine, state=state, callbacks=callbacks, checkpoints=checkpoints)


def buffers_of(model: Any) -> list[Any]:
    """Return the variables that a forward pass changes, such as running means; frozen weights are not among them."""
    trained = {id(each) for layer in model._flatten_layers() for each in layer._trainable_variables}
    return [each for each in model.non_trainable_weights if id(each) not in trained]


def seeds_of(model: Any) -> list[Any]:
    """Return the states of the model's random generators."""
    known = {id(each) for each in model.weights}
    return [each for each in model.variables if id(each) not in known and tuple(each.shape) == (2,)]


def _create_metric_variables(model: Any, feeder: BatchFeeder, training: KerasTraining) -> None:
    """Call losses and metrics once, because they create their variables at their first rows."""
    (rows,) = feeder.arrays(first_rows(training, FIRST_ROWS), parts=1)
    x, y, weights = (*feeder.structure(tuple(map(tf.constant, rows))), None)[:3]
    y_pred = model(x)
    if model._compile_loss is not None or model.losses:
        model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)
    model.compute_metrics(x, y, y_pred, sample_weight=weights)


def _build_optimizer(model: Any, values: Sequence[Any] | None) -> None:
    """Create the optimizer's variables; raise InvalidSettingsError if the values belong to other weights."""
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    if values is None:
        return
    variables = optimizer.variables
    if [tuple(each.shape) for each in values] != [tuple(each.shape) for each in variables]:
        raise InvalidSettingsError(
            f"the optimizer that the model was compiled with has {len(values)} values, and {len(variables)} are needed "
            "for the weights that are trained now; give a new optimizer"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)

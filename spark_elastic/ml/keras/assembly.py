"""How the training of a Keras model is put together in a worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from spark_elastic.collective.process import local_rank, local_size
from spark_elastic.elastic.handlers import Handlers, StateHandler
from spark_elastic.elastic.recovery import Recovery
from spark_elastic.elastic.steps import LoopWatch, OptimizerSteps, StepCounter
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.keras.elastic.handlers import handler_for
from spark_elastic.keras.sync_batch_normalization import convert
from spark_elastic.ml.callbacks import check_one_best
from spark_elastic.ml.keras.callbacks import KerasCallbacks, adapted
from spark_elastic.ml.keras.compiling import CompileArguments
from spark_elastic.ml.keras.engine import KerasEngine
from spark_elastic.ml.keras.feeding import Feeding, first_rows
from spark_elastic.ml.keras.metrics import MetricSums
from spark_elastic.ml.keras.objective import (
    Shares,
    divides_by_weights,
    for_outputs,
    metrics_by_row,
    row_exact,
    weigh_by_rows,
)
from spark_elastic.ml.keras.predictor import device_name, set_threads
from spark_elastic.ml.keras.spec import KerasTraining
from spark_elastic.ml.keras.steps import Steps
from spark_elastic.ml.preparation import WEIGHT
from spark_elastic.ml.training.engine import TrainingState, host_cores, threads_for
from spark_elastic.ml.training.progress import Progress
from spark_elastic.ml.training.saving import CheckpointSchedule
from spark_elastic.ml.training.trainer import Trainer

# What a worker computes with. TensorFlow takes what it is told before it runs first in a process.

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


# The state of a Keras model's training.


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


class Prepared(NamedTuple):
    """A model that is ready for its first step, and what the step needs."""

    model: Any
    compiled: CompileArguments
    feeding: Feeding
    sums: MetricSums
    steps: Steps
    buffers: list[Any]
    averaged: list[str]
    """Metrics that are functions and return one number for all rows that they are given."""


def prepared(training: KerasTraining) -> Prepared:
    """The model, compiled and with all variables that it will ever have.

    Raises: InvalidSettingsError, DataError: model, losses, metrics, optimizer and data do not fit together.
    """
    model, compiled = training.model.open(), training.compiled.open()
    if training.sync_batch_norm:
        convert(model)
    shares = Shares()
    weighted = any(field.name == WEIGHT for field in training.dataset.layout.fields)
    averaged: list[str] = []
    exact = metrics_by_row(row_exact(for_outputs(compiled, model), shares, weighted), averaged)
    model.compile(
        optimizer=exact.optimizer,
        loss=exact.loss,
        loss_weights=exact.loss_weights,
        metrics=exact.metrics,
        weighted_metrics=exact.weighted_metrics,
        jit_compile=False,  # the reduction calls back to this process, which compiled graphs cannot
    )
    feeding = Feeding(training, model, compiled)
    _build(model, feeding, training)
    weigh_by_rows(model, shares)
    _begin_optimizer(model, training.optimizer_values)
    sums = MetricSums(model)
    buffers = buffers_of(model)
    steps = Steps(
        training,
        model=model,
        feeding=feeding,
        sums=sums,
        shares=shares,
        buffers=buffers,
        seeds=seeds_of(model),
    )
    return Prepared(model, compiled, feeding, sums, steps, buffers, averaged)


def assemble(training: KerasTraining) -> Trainer:
    """Raises: as `prepared`; CheckpointError: `resume_from` cannot be used."""
    choose_threads(training.num_threads, local_size())
    choose_device(training.device, local_rank())
    model, compiled, feeding, sums, steps, buffers, _ = prepared(training)
    given = training.callbacks.open() if training.callbacks is not None else []
    callbacks = [*adapted(given, training, model), *training.plan_callbacks()]
    check_one_best(callbacks)
    kept = KerasCallbacks(callbacks, model)
    best = training.model.open() if any(callback.restores_best for callback in callbacks) else None
    engine = KerasEngine(
        training,
        model=model,
        best=best,
        feeding=feeding,
        sums=sums,
        steps=steps,
        buffers=buffers,
        callbacks=kept,
        by_weight=WEIGHT in feeding.names and divides_by_weights(compiled),
    )
    checkpoints = CheckpointSchedule(training, engine, callbacks, sums.names)
    at = checkpoints.first_progress()
    state = state_of(engine, callbacks=kept, at=at)
    return Trainer(training, engine=engine, state=state, callbacks=callbacks, checkpoints=checkpoints)


def buffers_of(model: Any) -> list[Any]:
    """What a forward pass changes: running means and the like. Not weights that are only frozen, however many."""
    trained = {id(each) for layer in model._flatten_layers() for each in layer._trainable_variables}
    return [each for each in model.non_trainable_weights if id(each) not in trained]


def seeds_of(model: Any) -> list[Any]:
    """The states of the model's generators of random numbers."""
    known = {id(each) for each in model.weights}
    return [each for each in model.variables if id(each) not in known and tuple(each.shape) == (2,)]


def _build(model: Any, feeding: Feeding, training: KerasTraining) -> None:
    """Have losses and metrics make their variables, which they do when they first see rows."""
    import tensorflow as tf

    (rows,) = feeding.arrays(first_rows(training), parts=1)
    x, y, weights = (*feeding.structure(tuple(map(tf.constant, rows))), None)[:3]
    y_pred = model(x)
    if model._compile_loss is not None or model.losses:
        model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)
    model.compute_metrics(x, y, y_pred, sample_weight=weights)


def _begin_optimizer(model: Any, values: Sequence[Any] | None) -> None:
    """Raises: InvalidSettingsError: the values are of an optimizer of something else."""
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

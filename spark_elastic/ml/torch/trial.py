"""One step of a copy of the training on its first rows, on the driver: errors come before any worker starts."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import cloudpickle
import torch

from spark_elastic.data.batch import Batch
from spark_elastic.data.read_order import resolve_order
from spark_elastic.errors import (
    CheckpointError,
    DataError,
    InvalidSettingsError,
    NotPicklableError,
    SparkElasticError,
)
from spark_elastic.ml.callbacks import Monitor, check_one_best
from spark_elastic.ml.estimator import TrialRun
from spark_elastic.ml.outputs import OutputShape, suits
from spark_elastic.ml.torch import losses
from spark_elastic.ml.torch.batches import BatchMaker, TorchBatch
from spark_elastic.ml.torch.metrics import Tally
from spark_elastic.ml.torch.model import TorchPredictor
from spark_elastic.ml.torch.objective import Measured, Objective
from spark_elastic.ml.torch.optimizers import Schedule, build_optimizer
from spark_elastic.ml.torch.single_rows import normalised_alone
from spark_elastic.ml.torch.snapshots import detached
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.torch.training import objective_of
from spark_elastic.ml.training.assembly import implied
from spark_elastic.ml.training.columns import shaped
from spark_elastic.ml.training.lasting import callback_states
from spark_elastic.ml.written_sets import model_inputs

log = logging.getLogger("spark_elastic.ml")

ROWS = 4
_RESERVED = ("epoch", "steps", "rows", "seconds", "lr", "loss")


def run_once(training: TorchTraining, inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None) -> TrialRun:
    """Forward, loss, metrics, backward and an optimizer step of a copy; then what `transform` will do.

    Raises:
        DataError: model, loss or metrics cannot deal with the rows; with the names and shapes of all tensors.
        InvalidSettingsError: the settings do not go together.
    """
    for name, value in (*training.model.named_parameters(), *training.model.named_buffers()):
        if value.is_meta:
            raise InvalidSettingsError(f"{name} of the model is on the meta device, where there are no values to train")
    resolve_order(training.dataset, order=training.order, shuffle=training.shuffle, cache_bytes=training.cache_bytes)
    check_one_best(training.callbacks)
    copied = _copied(training)
    generator = torch.random.get_rng_state()
    try:
        batch = _first_rows(copied)
        _step(copied, batch)
        return _outputs(copied, batch, inference_fn)
    finally:
        torch.random.set_rng_state(generator)


def _copied(training: TorchTraining) -> TorchTraining:
    """Pickled as a whole, as it will travel: model, optimizer and scheduler refer to one another.

    Raises: NotPicklableError: with the name of the setting.
    """
    try:
        return cloudpickle.loads(cloudpickle.dumps(training))  # type: ignore[no-any-return]
    except Exception as error:
        for each in fields(training):
            value = getattr(training, each.name)
            try:
                cloudpickle.loads(cloudpickle.dumps(value))
            except Exception as why:
                raise NotPicklableError(
                    f"{each.name} ({type(value).__name__}) cannot be sent to the workers: {why}; what cannot be "
                    "pickled (locks, connections, open files) has to be made where it is first used"
                ) from error
        raise NotPicklableError(f"the training cannot be sent to the workers: {error}") from error


def _first_rows(training: TorchTraining) -> Batch:
    reader = training.dataset.reader("train", batch_size=ROWS, shuffle=False, prefetch=1)
    try:
        return next(iter(reader.epoch(0)))
    finally:
        reader.close()


def _step(training: TorchTraining, batch: Batch) -> None:
    for name in training.metrics:
        if name in _RESERVED or name.startswith("val_"):
            raise InvalidSettingsError(f"a metric cannot be called {name!r}: the history has a column of that name")
    model = training.model.cpu().train()
    optimizer = build_optimizer(training.optimizer, model)
    schedule = Schedule(training, optimizer)
    objective = objective_of(training)
    tally = Tally(objective, training.metrics)
    parts = BatchMaker(training, torch.device("cpu")).parts(batch, 1)
    part = parts[0]
    with _explained("the model and its loss", part), normalised_alone(model, part.rows), _no_broadcast():
        measured: Measured = objective.measure(model, part)
        counts = objective.counts(parts) if objective.normalised else ()
        share = objective.share(measured, part.rows, counts)
        _check_pairs(objective, part, measured)
    with _explained("the metrics", part, measured):
        sums = torch.zeros(tally.width, dtype=torch.float64)
        piece = tally.measure(measured, part.rows, sums)
    if not share.requires_grad:
        raise InvalidSettingsError(
            "the loss does not depend on any parameter that is trained: all of them are frozen (requires_grad=False), "
            "or the model or train_fn detaches its result"
        )
    with _explained("the backward pass", part, measured):
        share.backward()  # type: ignore[no-untyped-call]
    try:
        optimizer.step()
    except Exception as error:
        raise InvalidSettingsError(
            f"{type(optimizer).__name__} cannot change the model's parameters: {type(error).__name__}: {error}"
        ) from error
    _check_followed(training, schedule, tally, sums, piece)
    _check_written(training, model, optimizer, schedule)


def _check_pairs(objective: Objective, part: TorchBatch, measured: Measured) -> None:
    """Raises: DataError: a function of the user's compares each output with the labels of all rows."""
    for at, (term, label) in enumerate(zip(objective.terms, part.labels, strict=False)):
        output, given = measured.outputs[at], measured.labels[at]
        if term.of_classes or term.of_numbers or label.shape == output.shape or label.numel() != output.numel():
            continue
        # with labels of our own, because those of the first rows may be all the same
        given = (torch.arange(given.numel()) % 2).to(given.dtype).reshape(given.shape)
        try:
            with torch.no_grad():
                whole = term(output, given, None, part.rows)
                rows = [term(output[row : row + 1], given[row : row + 1], None, 1) for row in range(part.rows)]
        except Exception as error:
            log.info("%s cannot be tried row by row: %s", term.name, error)
            continue
        if not torch.isclose(sum(rows, torch.zeros(())), whole, rtol=1e-3, equal_nan=True):
            raise DataError(
                f"{term.name} is not a mean over rows: label_{at} {list(given.shape)} and output {at} "
                f"{list(output.shape)} seem to be compared in all pairs; give them one shape, in the loss or by "
                "label_shapes"
            )


@contextmanager
def _no_broadcast() -> Iterator[None]:
    """torch only warns of labels that a loss compares with each of the outputs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")
        yield


def _check_followed(
    training: TorchTraining, schedule: Schedule, tally: Tally, sums: torch.Tensor, piece: dict[str, Any]
) -> None:
    """Raises: InvalidSettingsError: something follows a column that the history will not have."""
    try:
        logs = tally.logs(sums.numpy(), [piece])
    except Exception as error:  # a metric may need more than the first rows
        log.info("the names of the history's columns are not known yet: %s", error)
        return
    row = dict.fromkeys(("epoch", "steps", "rows", "seconds", "lr"), 1.0) | logs
    if training.validates:
        row |= {f"val_{name}": value for name, value in logs.items()}
    for callback in [*training.callbacks, *implied(training.checkpoints)]:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, Monitor):
            monitor.value(row)
    schedule.after_step()
    schedule.after_epoch(row)


def _check_written(
    training: TorchTraining, model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule
) -> None:
    """Raises: InvalidSettingsError: what will have to be written cannot be."""
    try:
        detached(model.state_dict(), "the model", copy=False)
        for callback, state in zip(training.callbacks, callback_states(training.callbacks), strict=True):
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"state_dict() of {type(callback).__name__} is not for JSON: {error}") from error
        if training.checkpoints is not None:
            detached(optimizer.state_dict(), "the optimizer", copy=False)
            if schedule.scheduler is not None:
                detached(schedule.scheduler.state_dict(), "the lr_scheduler", copy=False)
    except CheckpointError as error:
        raise InvalidSettingsError(f"the training's state cannot be written: {error}") from error


def _outputs(training: TorchTraining, batch: Batch, inference_fn: Any) -> TrialRun:
    """The model in eval mode, called as `transform` calls it."""
    features: dict[str, Any] = {
        field.name: shaped(batch.tensors[field.name], field.shape, batch.rows)
        for field in model_inputs(training.dataset, training.input_shapes)
    }
    try:
        if inference_fn is not None:
            features = dict(inference_fn(features))
        outputs = TorchPredictor(training.model.eval(), "cpu")(features)
        for index, output in enumerate(outputs):
            if output.shape[:1] != (batch.rows,):
                raise DataError(f"output {index} has shape {list(output.shape)} for {batch.rows} rows")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if inference_fn is None and training.transformation_fn is not None:
            why += " (training saw the rows through transformation_fn; transform does so through inference_fn)"
        log.warning("transform will not work: the model cannot be called with its features alone: %s", why)
        return TrialRun((), why_not=why)
    shapes = tuple(OutputShape(output.dtype.str, output.shape[1:]) for output in outputs)
    given = training.loss[0] if isinstance(training.loss, (list, tuple)) else training.loss
    rule = losses.rule(given)
    return TrialRun(shapes, rule if rule is not None and suits(rule, shapes[0].shape) else None)


class _explained:
    """Errors of the user's code, with what it was called with."""

    def __init__(self, what: str, part: TorchBatch, measured: Measured | None = None) -> None:
        self._what, self._part, self._measured = what, part, measured

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, InvalidSettingsError):
            return
        seen = [f"{name} {_shape(value)}" for name, value in self._part.tensors.items()]
        if self._measured is not None:
            seen += [f"output {number} {_shape(value)}" for number, value in enumerate(self._measured.outputs)]
        said = str(error) if isinstance(error, SparkElasticError) else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{self._what} cannot deal with the first {self._part.rows} rows: {said}\nThe tensors were: "
            f"{', '.join(seen)}. What does not fit can be changed by input_shapes, label_shapes, the columns' types or "
            "a transformation_fn"
        ) from error


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__

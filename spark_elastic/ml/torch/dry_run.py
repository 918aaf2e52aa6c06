"""One step of a copy of the training on its first rows, on the driver: errors come before any worker starts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from spark_elastic.data.reader import Batch, resolve_order
from spark_elastic.errors import CheckpointError, DataError, InvalidSettingsError
from spark_elastic.ml.callbacks import check_one_best
from spark_elastic.ml.datasets import model_inputs
from spark_elastic.ml.outputs import OutputShape, suits
from spark_elastic.ml.torch import objective as losses
from spark_elastic.ml.torch.batch_norm import normalised_alone
from spark_elastic.ml.torch.batches import BatchMaker, TorchBatch
from spark_elastic.ml.torch.metrics import Tally
from spark_elastic.ml.torch.model import TorchPredictor
from spark_elastic.ml.torch.objective import Measured, Objective
from spark_elastic.ml.torch.optimizers import Schedule, build_optimizer
from spark_elastic.ml.torch.serialization import detached
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.torch.training import objective_of
from spark_elastic.ml.training.columns import reshaped
from spark_elastic.ml.training.dry_run import (
    DryRunResult,
    UserCodeContext,
    check_callback_states,
    check_metric_names,
    check_monitored_columns,
    history_row,
    round_trip_pickle,
    warn_of_averaged_metrics,
    warn_of_local_batch_statistics,
)
from spark_elastic.torch.sync_batch_norm import unconverted

log = logging.getLogger("spark_elastic.ml")

ROWS = 4


def run_once(
    training: TorchTraining, inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None
) -> DryRunResult:
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
    if training.sync_batch_norm:
        warn_of_local_batch_statistics(unconverted(training.model), "forward", "torch.nn.BatchNorm1d, 2d or 3d")
    copied = round_trip_pickle(training)
    generator = torch.random.get_rng_state()
    try:
        batch = _first_rows(copied)
        _step(copied, batch)
        return _outputs(copied, batch, inference_fn)
    finally:
        torch.random.set_rng_state(generator)


def _first_rows(training: TorchTraining) -> Batch:
    reader = training.dataset.reader("train", batch_size=ROWS, shuffle=False, prefetch=1)
    try:
        return next(iter(reader.epoch(0)))
    finally:
        reader.close()


def _step(training: TorchTraining, batch: Batch) -> None:
    check_metric_names(training.metrics)
    model = training.model.cpu().train()
    optimizer = build_optimizer(training.optimizer, model)
    schedule = Schedule(training, optimizer)
    objective = objective_of(training)
    tally = Tally(objective, training.metrics)
    parts = BatchMaker(training, torch.device("cpu")).parts(batch, 1)
    part = parts[0]
    with (
        UserCodeContext("the model and its loss", part.rows, _seen(part)),
        normalised_alone(model, part.rows),
        _no_broadcast(),
    ):
        measured: Measured = objective.measure(model, part)
        counts = objective.counts(parts) if objective.normalised else ()
        share = objective.share(measured, part.rows, counts)
        _check_pairs(objective, part, measured)
    with UserCodeContext("the metrics", part.rows, _seen(part, measured)):
        sums = torch.zeros(tally.width, dtype=torch.float64)
        piece = tally.measure(measured, part.rows, sums)
    warn_of_averaged_metrics(
        tally.averaged, "a torchmetrics metric (torchmetrics.AUROC, ...), whose states are added up"
    )
    if not share.requires_grad:
        raise InvalidSettingsError(
            "the loss does not depend on any parameter that is trained: all of them are frozen (requires_grad=False), "
            "or the model or train_fn detaches its result"
        )
    with UserCodeContext("the backward pass", part.rows, _seen(part, measured)):
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
    row = history_row(training, logs)
    check_monitored_columns([*training.callbacks, *training.plan_callbacks()], row)
    schedule.after_step()
    schedule.after_epoch(row)


def _check_written(
    training: TorchTraining, model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule
) -> None:
    """Raises: InvalidSettingsError: what will have to be written cannot be."""
    try:
        detached(model.state_dict(), "the model", copy=False)
        check_callback_states(training.callbacks)
        if training.checkpoints is not None:
            detached(optimizer.state_dict(), "the optimizer", copy=False)
            if schedule.scheduler is not None:
                detached(schedule.scheduler.state_dict(), "the lr_scheduler", copy=False)
    except CheckpointError as error:
        raise InvalidSettingsError(f"the training's state cannot be written: {error}") from error


def _outputs(training: TorchTraining, batch: Batch, inference_fn: Any) -> DryRunResult:
    """The model in eval mode, called as `transform` calls it."""
    features: dict[str, Any] = {
        field.name: reshaped(batch.tensors[field.name], field.shape, batch.rows)
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
        return DryRunResult((), why_not=why)
    shapes = tuple(OutputShape(output.dtype.str, output.shape[1:]) for output in outputs)
    given = training.loss[0] if isinstance(training.loss, (list, tuple)) else training.loss
    rule = losses.rule(given)
    return DryRunResult(shapes, rule if rule is not None and suits(rule, shapes[0].shape) else None)


def _seen(part: TorchBatch, measured: Measured | None = None) -> dict[str, Any]:
    outputs = () if measured is None else measured.outputs
    return {**part.tensors, **{f"output {number}": value for number, value in enumerate(outputs)}}

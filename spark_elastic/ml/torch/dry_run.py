"""Do one step of a copy of the training on its first rows, on the driver, so that errors come before workers start."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spark_elastic.data.reader import Batch
from spark_elastic.errors import CheckpointError, DataError, InvalidSettingsError
from spark_elastic.ml.callbacks import check_one_best
from spark_elastic.ml.torch.engine import objective_of, single_row_norm
from spark_elastic.ml.torch.metrics import TorchMetricAccumulator
from spark_elastic.ml.torch.model import TorchPredictor
from spark_elastic.ml.torch.objective import BatchMaker, ForwardResult, Objective, TorchBatch, rule
from spark_elastic.ml.torch.serialization import detached
from spark_elastic.ml.torch.spec import LearningRateSchedule, TorchTraining, build_optimizer
from spark_elastic.ml.training import dry_run as common
from spark_elastic.ml.training.dry_run import DryRunResult, UserCodeContext
from spark_elastic.ml.training.engine import first_rows
from spark_elastic.torch.sync_batch_norm import unconverted

log = logging.getLogger("spark_elastic.ml")


def dry_run(
    training: TorchTraining, inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None
) -> DryRunResult:
    """Do forward, loss, metrics, backward and an optimizer step on a copy; then call the model as `transform` does.

    Raises DataError, InvalidSettingsError or NotPicklableError as the functions of `ml.training.dry_run` do.
    """
    for name, value in (*training.model.named_parameters(), *training.model.named_buffers()):
        if value.is_meta:
            raise InvalidSettingsError(
                f"{name} of the model is on the meta device, which holds no values to train; give a model on the CPU"
            )
    common.check_order(training)
    check_one_best(training.callbacks)
    if training.sync_batch_norm:
        common.warn_of_local_batch_statistics(unconverted(training.model), "forward", "torch.nn.BatchNorm1d, 2d or 3d")
    copied = common.round_trip_pickle(training)
    generator = torch.random.get_rng_state()
    try:
        batch = first_rows(copied, common.ROWS)
        _step(copied, batch)
        first = training.loss[0] if isinstance(training.loss, (list, tuple)) else training.loss
        return common.try_transform(
            copied, batch, TorchPredictor(copied.model.eval(), "cpu"), inference_fn, rule(first)
        )
    finally:
        torch.random.set_rng_state(generator)


def _step(training: TorchTraining, batch: Batch) -> None:
    common.check_metric_names(training.metrics)
    model = training.model.cpu().train()
    optimizer = build_optimizer(training.optimizer, model)
    schedule = LearningRateSchedule(training, optimizer)
    objective = objective_of(training)
    metrics = TorchMetricAccumulator(objective, training.metrics)
    parts = BatchMaker(training, torch.device("cpu")).parts(batch, 1)
    part = parts[0]
    with (
        UserCodeContext("the model and its loss", part.rows, part.tensors),
        single_row_norm(model, part.rows),
        warnings.catch_warnings(),
    ):
        # torch warns of a loss that compares each output with the labels of all rows; here that is an error
        warnings.filterwarnings("error", message="Using a target size")
        result = objective.forward(model, part)
        counts = objective.counts(parts) if objective.normalised else ()
        share = objective.share(result, part.rows, counts)
        _check_pairs(objective, part, result)
    seen = {**part.tensors, **{f"output {number}": value for number, value in enumerate(result.outputs)}}
    with UserCodeContext("the metrics", part.rows, seen):
        sums = torch.zeros(metrics.width, dtype=torch.float64)
        piece = metrics.measure(result, part.rows, sums)
    common.warn_of_averaged_metrics(
        metrics.averaged, "a torchmetrics metric (torchmetrics.AUROC, ...), whose states are added up"
    )
    if not share.requires_grad:
        raise InvalidSettingsError(
            "the loss does not depend on any parameter that is trained: all of them are frozen (requires_grad=False), "
            "or the model or train_fn detaches its result"
        )
    with UserCodeContext("the backward pass", part.rows, seen):
        share.backward()  # type: ignore[no-untyped-call]
    with common.optimizer_errors(optimizer, "parameters"):
        optimizer.step()
    try:
        logs = metrics.logs(sums.numpy(), [piece])
    except Exception as error:  # a metric may need more than the first rows
        log.info("the names of the history's columns are not known yet: %s", error)
    else:
        row = common.check_monitors(training, training.callbacks, logs)
        schedule.after_step()
        schedule.after_epoch(row)
    _check_writable(training, model, optimizer, schedule)


def _check_pairs(objective: Objective, part: TorchBatch, result: ForwardResult) -> None:
    """Raise DataError if a user's loss broadcasts, and so compares each output with the labels of all rows.

    The loss of all rows must be the sum of the losses of each row alone.
    """
    for at, (term, label) in enumerate(zip(objective.terms, part.labels, strict=False)):
        output, given = result.outputs[at], result.labels[at]
        if term.of_classes or term.of_numbers or label.shape == output.shape or label.numel() != output.numel():
            continue
        # Invented labels, because the labels of the first rows may all be equal, which would hide the difference.
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


def _check_writable(
    training: TorchTraining, model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: LearningRateSchedule
) -> None:
    """Raise InvalidSettingsError if the model or a checkpoint could not be written."""
    try:
        detached(model.state_dict(), "the model", copy=False)
        common.check_callback_states(training.callbacks)
        if training.checkpoints is not None:
            detached(optimizer.state_dict(), "the optimizer", copy=False)
            if schedule.scheduler is not None:
                detached(schedule.scheduler.state_dict(), "the lr_scheduler", copy=False)
    except CheckpointError as error:
        raise InvalidSettingsError(f"the training's state cannot be written: {error}") from error

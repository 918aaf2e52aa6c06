"""One step of a copy of the training on its first rows, on the driver: errors come before any worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch

from spark_elastic.data.batch import Batch
from spark_elastic.errors import DataError, InvalidSettingsError, SparkElasticError
from spark_elastic.ml.estimator import TrialRun
from spark_elastic.ml.outputs import OutputShape, suits
from spark_elastic.ml.torch import losses
from spark_elastic.ml.torch.batches import INPUT, BatchMaker, TorchBatch
from spark_elastic.ml.torch.metrics import Tally
from spark_elastic.ml.torch.model import TorchPredictor
from spark_elastic.ml.torch.objective import Measured
from spark_elastic.ml.torch.optimizers import Schedule, build_optimizer
from spark_elastic.ml.torch.single_rows import normalised_alone
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.torch.training import objective_of

log = logging.getLogger("spark_elastic.ml")

ROWS = 4
_RESERVED = ("epoch", "steps", "rows", "seconds", "lr", "loss")


def run_once(training: TorchTraining, inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None) -> TrialRun:
    """Forward, loss, metrics, backward and an optimizer step of a copy; then what `transform` will do.

    Raises:
        DataError: model, loss or metrics cannot deal with the rows; with the names and shapes of all tensors.
        InvalidSettingsError: the settings do not go together.
    """
    # Pickled as a whole, as it will travel: model, optimizer and scheduler refer to one another.
    copied: TorchTraining = cloudpickle.loads(cloudpickle.dumps(training))
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
    for name in training.metrics:
        if name in _RESERVED or name.startswith("val_"):
            raise InvalidSettingsError(f"a metric cannot be called {name!r}: the history has a column of that name")
    model = training.model.cpu().train()
    optimizer = build_optimizer(training.optimizer, model)
    Schedule(training, optimizer, "loss")
    objective = objective_of(training)
    tally = Tally(objective, training.metrics)
    parts = BatchMaker(training, torch.device("cpu")).parts(batch, 1)
    part = parts[0]
    with _explained("the model and its loss", part), normalised_alone(model, part.rows):
        measured: Measured = objective.measure(model, part)
        counts = objective.counts(parts) if objective.normalised else ()
        share = objective.share(measured, part.rows, counts)
    with _explained("the metrics", part, measured):
        tally.measure(measured, part.rows, torch.zeros(tally.width, dtype=torch.float64))
    if not share.requires_grad:
        raise InvalidSettingsError(
            "the loss does not depend on any parameter that is trained: all of them are frozen (requires_grad=False), "
            "or the model or train_fn detaches its result"
        )
    with _explained("the backward pass", part, measured):
        share.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _outputs(training: TorchTraining, batch: Batch, inference_fn: Any) -> TrialRun:
    """The model in eval mode, called as `transform` calls it."""
    features: dict[str, Any] = {name: value for name, value in batch.tensors.items() if name.startswith(INPUT)}
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

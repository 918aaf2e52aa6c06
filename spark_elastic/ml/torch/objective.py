"""The batches of a module as tensors, and its losses as sums over rows, which the workers' shares of a batch add up to.

A worker's gradient is that of (sum over its rows) / (rows of the whole batch). Gradients are then summed, not averaged,
so neither the number of workers nor an uneven division of the last batch changes a step.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from spark_elastic.data.reader import Batch
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.preparation import (
    FLOAT,
    INPUT,
    INTEGER,
    LABEL,
    WEIGHT,
    Columns,
    is_trained_on,
    numbered,
    ragged_column_error,
    split_evenly,
)
from spark_elastic.ml.torch.model_step import ForwardResult, ModelStep, StepPlace, TorchBatch
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.engine import first_rows

# --- batches --------------------------------------------------------------------------------------


class BatchMaker:
    """A converter of a reader's batches to `TorchBatch`, one for each part of gradient accumulation."""

    def __init__(self, training: TorchTraining, device: torch.device) -> None:
        self._columns = Columns(training, needs_labels=training.train_fn is None)
        self._training = training
        self._device = device

    def parts(self, batch: Batch, most: int | None = None) -> list[TorchBatch]:
        """Divide a batch into at most `most` parts of about equal size; [] if this worker has no rows of it.

        `most` is the number of parts of gradient accumulation, unless it is given. Raises DataError if
        `transformation_fn` returned something that cannot be trained on.
        """
        if not batch.rows:
            return []
        tensors = {name: self._tensor(name, value) for name, value in self._columns.of(batch).items()}
        edges = split_evenly(batch.rows, most or self._training.accumulation)
        if len(edges) == 1:
            return [_batch(tensors, batch.rows)]
        return [
            _batch({name: value[start:stop] for name, value in tensors.items()}, stop - start) for start, stop in edges
        ]

    @functools.cached_property
    def first_row(self) -> TorchBatch:
        """The first row of the training dataset, for a worker without rows that must call the model all the same."""
        return self.parts(first_rows(self._training, 1), 1)[0]

    def _tensor(self, name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value)
        if isinstance(value, torch.Tensor):
            # Rows are views of records. Models that were written for a DataLoader call view(-1), which needs this.
            return value.contiguous().to(self._device, non_blocking=True)
        if is_trained_on(name):
            raise ragged_column_error(name, value)
        return value


def _batch(tensors: Mapping[str, Any], rows: int) -> TorchBatch:
    inputs, labels = (tuple(numbered(prefix, tensors)) for prefix in (INPUT, LABEL))
    return TorchBatch(inputs, labels, tensors.get(WEIGHT), rows, tensors)


# --- known losses: how they read labels, and how a prediction follows from an output ---------------

_RULES: Mapping[Any, str] = {
    **dict.fromkeys((nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss), "argmax"),
    **dict.fromkeys((F.cross_entropy, F.nll_loss, F.multi_margin_loss), "argmax"),
    **dict.fromkeys((nn.BCEWithLogitsLoss, nn.SoftMarginLoss), "binary_logit"),
    **dict.fromkeys((F.binary_cross_entropy_with_logits, F.soft_margin_loss), "binary_logit"),
    **dict.fromkeys((nn.BCELoss, F.binary_cross_entropy), "binary_probability"),
    **dict.fromkeys((nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss), "value"),
    **dict.fromkeys((nn.KLDivLoss, nn.MultiLabelSoftMarginLoss, F.kl_div, F.multilabel_soft_margin_loss), "value"),
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss), "value"),
}
"""The rule for a prediction from the output of torch's losses, which are classes and functions."""


def rule(loss: Any) -> str | None:
    """Return the rule for a prediction from an output of this loss, as in the setting `prediction`; None: unknown."""
    kinds = [loss] if inspect.isroutine(loss) else type(loss).__mro__
    return next((_RULES[kind] for kind in kinds if kind in _RULES), None)


def label_dtype(loss: Any) -> str | None:
    """Return the type that this loss needs for scalar labels: INTEGER for class numbers, else FLOAT; None: unknown.

    Spark ML's own stages, such as StringIndexer, give class numbers as doubles, and regression labels may be integers.
    Only the loss tells the two apart.
    """
    found = rule(loss)
    return None if found is None else INTEGER if found == "argmax" else FLOAT


# --- losses as sums -------------------------------------------------------------------------------


class LossTerm:
    """One loss of one output and one label, as a sum over rows.

    Without sample weights, a loss may return the mean over the rows, a value for each row or, with `reduction="sum"`,
    their sum. With sample weights, it must be able to return a value for each row.
    """

    def __init__(self, loss: Callable[..., Any], weighted: bool) -> None:
        self.name = getattr(loss, "__name__", type(loss).__name__)
        self.is_sum = getattr(loss, "reduction", "mean") == "sum"
        self.normalised = (
            isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
            and loss.reduction == "mean"
            and (loss.weight is not None or loss.ignore_index != -100)
        )
        """The loss divides by the sum of class weights, or by the labels that are not ignored; see `count`."""
        self.rule = rule(loss)
        self.of_classes = self.rule == "argmax"
        self.of_numbers = self.rule is not None and not self.of_classes
        """Labels are numbers, which are given the output's shape. A user's own loss must do this itself."""
        self._loss = loss
        if weighted:
            self._loss = _with_reduction(loss, "none") or loss
        elif self.normalised:
            self._loss = _with_reduction(loss, "sum") or loss

    def count(self, label: torch.Tensor) -> float:
        """Return what these rows add to the denominator of a normalised loss."""
        loss: Any = self._loss
        if label.is_floating_point():  # a probability for each class, for which torch divides by the rows
            return float(label.numel() // label.shape[1])
        counted = label[label != loss.ignore_index]
        return float(counted.numel() if loss.weight is None else loss.weight[counted].sum())

    def __call__(
        self, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor | None, rows: int
    ) -> torch.Tensor:
        """Return the sum of the loss over the rows; raise DataError if the loss returned a wrong shape."""
        value: torch.Tensor = self._loss(output, label)
        if weights is not None:
            if value.dim() == 0 or value.shape[0] != rows:
                raise DataError(
                    f"{self.name} returned a tensor of shape {tuple(value.shape)} for {rows} rows; with sample weights "
                    "it has to return a value for each row"
                )
            return _of_rows(value, self.is_sum) @ weights.to(value.dtype)
        if value.dim() == 0:
            return value if self.is_sum or self.normalised else value * rows
        if value.shape[0] != rows:
            raise DataError(f"{self.name} returned a tensor of shape {tuple(value.shape)} for {rows} rows")
        return _of_rows(value, self.is_sum).sum()


class Objective:
    """The losses of a training and their weights; see `TorchTraining` for the settings.

    `labels` is the number of labels; `weighted` says that there are sample weights. Raises InvalidSettingsError if the
    numbers of losses, weights and labels do not match.
    """

    def __init__(
        self,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
        train_fn: Callable[..., Any] | None,
        *,
        labels: int,
        weighted: bool,
        loss_weights: Sequence[float] | None = None,
    ) -> None:
        self._train_fn = train_fn
        self._step = train_fn if isinstance(train_fn, ModelStep) else None
        self.terms: list[LossTerm] = []
        if train_fn is None:
            several = isinstance(loss, Sequence)
            losses: Any = loss if several else [loss] * max(1, labels)
            if labels and len(losses) != labels:
                raise InvalidSettingsError(f"{len(losses)} losses were given for {labels} labels")
            self.terms = [LossTerm(one, weighted) for one in losses]
        count = len(self.terms) or 1
        self.weights = list(loss_weights or [1.0] * count)
        if len(self.weights) != count:
            raise InvalidSettingsError(f"{len(self.weights)} loss_weights were given for {count} losses")

    def __len__(self) -> int:
        return max(1, len(self.terms))

    def rule(self, which: int | None) -> str | None:
        """Return the rule for predictions from output number `which`, or from the only one; None if unknown."""
        if which is None:
            return self.terms[0].rule if len(self.terms) == 1 else None
        return self.terms[which].rule if 0 <= which < len(self.terms) else None

    @property
    def normalised(self) -> bool:
        return any(term.normalised for term in self.terms) or (self._step is not None and self._step.normalised)

    def counts(self, parts: Sequence[TorchBatch]) -> list[float]:
        """Return what this worker's rows add to the denominators of the normalised losses; 0 for the others."""
        if self._step is not None:
            return [sum(map(self._step.count, parts))]
        return [
            sum(term.count(part.labels[at]) for part in parts) if term.normalised else 0.0
            for at, term in enumerate(self.terms)
        ]

    def set_mode(self, model: torch.nn.Module, training: bool) -> None:
        """Put the model in training mode or in eval mode."""
        if self._step is None:
            model.train(training)
        else:
            self._step.set_mode(model, training)

    def begin(self, model: torch.nn.Module, place: StepPlace) -> None:
        """Tell a `ModelStep` where in the training the next calls of `forward` are."""
        if self._step is not None:
            self._step.begin(model, place)

    def forward(self, model: torch.nn.Module, batch: TorchBatch) -> ForwardResult:
        """Run the forward pass and the losses; raise DataError if outputs and losses do not match."""
        if self._step is not None:
            return self._step(model, batch)
        if self._train_fn is not None:
            return self._forward_by_train_fn(self._train_fn, model, batch)
        outputs = outputs_of(model(*batch.inputs))
        labels = batch.labels
        if len(outputs) < len(self.terms):
            raise DataError(f"the model has {len(outputs)} outputs and there are {len(self.terms)} losses")
        if labels:
            labels = tuple(
                shaped_like(label, output, term.of_numbers)
                for term, label, output in zip(self.terms, labels, outputs, strict=False)
            )
        sums, counts = [], []
        for at, term in enumerate(self.terms):
            label = labels[at] if labels else batch.inputs[0]
            try:
                sums.append(term(outputs[at], label, batch.weights, batch.rows))
            except IndexError as error:
                raise DataError(_out_of_range(term, at, label, outputs[at], error)) from error
            counts.append(term.count(label) if term.normalised else float(batch.rows))
        return ForwardResult(outputs, labels, sums, counts)

    def _forward_by_train_fn(self, train_fn: Any, model: torch.nn.Module, batch: TorchBatch) -> ForwardResult:
        returned = train_fn(model, batch)
        loss, outputs = returned if isinstance(returned, tuple) else (returned, ())
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise DataError(f"train_fn must return a loss of one value, or (loss, outputs), not {returned!r:.200}")
        return ForwardResult(outputs_of(outputs), batch.labels, [loss.reshape(()) * batch.rows], [float(batch.rows)])

    def share(self, result: ForwardResult, global_rows: int, global_counts: Sequence[float]) -> torch.Tensor:
        """Return this worker's share of the batch's loss, a scalar for `backward`; the shares of all add up to it.

        `global_rows` are the rows of the whole batch, and `global_counts` are the `counts` of all workers, added up.
        """
        divisors = [float(global_rows)] * len(self)
        if self._step is not None and self._step.normalised:
            divisors[0] = global_counts[0] or 1.0
        for at, term in enumerate(self.terms):
            if term.normalised:
                divisors[at] = global_counts[at] or 1.0
            elif term.is_sum:
                divisors[at] = 1.0
        parts = zip(result.sums, self.weights, divisors, strict=True)
        return functools.reduce(torch.add, [value * (weight / divisor) for value, weight, divisor in parts])

    def means(self, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return the columns of the history: "loss", and with several losses also "loss_0", "loss_1", ...

        There is none if a `ModelStep` computed no loss.
        """
        if self._step is not None and not any(counts):
            return {}
        each = [value / count if count else float("nan") for value, count in zip(sums, counts, strict=True)]
        total = sum(weight * value for weight, value in zip(self.weights, each, strict=True))
        return {"loss": total, **({f"loss_{at}": value for at, value in enumerate(each)} if len(each) > 1 else {})}


def shaped_like(label: torch.Tensor, output: torch.Tensor, of_numbers: bool = False) -> torch.Tensor:
    """Give labels that are numbers the output's shape, if both have as many values.

    Integers are class numbers, unless the loss is one `of_numbers`. Labels [rows] and an output [rows, 1] would be
    broadcast to [rows, rows], which no loss reports as an error.
    """
    numbers = of_numbers or label.is_floating_point()
    if numbers and label.shape != output.shape and label.numel() == output.numel():
        return label.view(output.shape)
    return label


def _out_of_range(term: LossTerm, at: int, label: torch.Tensor, output: torch.Tensor, error: Exception) -> str:
    if not term.of_classes or not label.numel():
        return f"{term.name} of label_{at}: {error}"
    return (
        f"{term.name}: label_{at} (label column number {at}, from 0) has values from {label.min().item()} to "
        f"{label.max().item()} in this batch, and output {at} is of shape {tuple(output.shape)}: {error}"
    )


def outputs_of(value: Any) -> tuple[Any, ...]:
    """Return the outputs of a module that returned one value, or several in a tuple, list or mapping."""
    if isinstance(value, Mapping):
        return tuple(value.values())
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _of_rows(value: torch.Tensor, sums: bool) -> torch.Tensor:
    """Reduce values of shape [rows, ...] to one value for each row: their sum, or their mean."""
    if value.dim() == 1:
        return value
    flat = value.flatten(1)
    return flat.sum(1) if sums else flat.mean(1)


def _with_reduction(loss: Any, reduction: str) -> Callable[..., Any] | None:
    """Return the same loss with another reduction; None if its reduction cannot be chosen."""
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        other: Any = copy.copy(loss)
        other.reduction = reduction
        return other  # type: ignore[no-any-return]
    try:
        if "reduction" in inspect.signature(loss).parameters:
            return functools.partial(loss, reduction=reduction)
    except (TypeError, ValueError):  # builtins have no signature
        pass
    return None

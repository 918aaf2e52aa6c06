"""The batches of a module as tensors, and its losses as sums over rows, which the workers' shares of a batch add up to.

A worker's gradient is that of (sum over its rows) / (rows of the whole batch). Gradients are then summed, not averaged,
so neither the number of workers nor an uneven division of the last batch changes a step. A loss that divides by
something else than rows, such as the labels that are not ignored, gives that denominator with its sum. The denominators
travel with the gradients, which are then scaled; only several losses need them before the backward pass.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
    numbered,
    ragged_column_error,
    split_evenly,
)
from spark_elastic.ml.torch.model_step import (
    ForwardResult,
    ModelStep,
    Number,
    StepPosition,
    TorchBatch,
    number_of,
    summed,
)
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.engine import first_rows

log = logging.getLogger("spark_elastic.ml")


class BatchMaker:
    """A converter of a reader's batches to `TorchBatch`, one for each part of gradient accumulation."""

    def __init__(self, training: TorchTraining, device: torch.device) -> None:
        self._columns = Columns(training, needs_labels=training.train_fn is None)
        self._training = training
        self._device = device

    def parts(self, batch: Batch, most: int | None = None) -> list[TorchBatch]:
        """Divide a batch into at most `most` parts, or those of accumulation; [] if this worker has no rows of it."""
        if not batch.rows:
            return []
        tensors = {name: self._tensor(name, value) for name, value in self._columns.convert(batch).items()}
        edges = split_evenly(batch.rows, most or self._training.accumulation_steps)
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
            if self._device.type == "cuda" and value.device.type == "cpu" and value.layout is torch.strided:
                # page-locked: otherwise CUDA makes this copy itself, and the caller waits for it
                pinned = torch.empty_like(value, memory_format=torch.contiguous_format, pin_memory=True)
                return pinned.copy_(value).to(self._device, non_blocking=True)
            return value.contiguous().to(self._device, non_blocking=True)
        if name.startswith((INPUT, LABEL)) or name == WEIGHT:
            raise ragged_column_error(name, value)
        return value


class BatchesAhead:
    """The batches of an epoch, the next of which is copied to the GPU while that computes the present one."""

    def __init__(self, batches: Iterator[Batch], rows: int, maker: BatchMaker) -> None:
        self._batches, self._rows, self._maker = batches, rows, maker
        self._next: Batch | None = None
        self._parts: list[TorchBatch] = []
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        return next(self._batches) if self._next is None else self._next

    def parts(self, batch: Batch) -> list[TorchBatch]:
        """Return the parts of a batch, as `BatchMaker` does."""
        made, self._parts = self._parts, []
        if batch is not self._next:
            return self._maker.parts(batch)
        self._next = None
        return made

    def fetch(self, present: Batch) -> None:
        """Read the batch after this one, and queue its copy behind what the GPU has to do; errors are raised later."""
        if present.stop < self._rows and self._next is None:  # at its end, an epoch waits for checksums
            try:
                batch = next(self._batches)
                self._parts = self._maker.parts(batch)
                self._next = batch
            except Exception as error:
                self._error = error


def _batch(tensors: Mapping[str, Any], rows: int) -> TorchBatch:
    inputs, labels = (tuple(numbered(prefix, tensors)) for prefix in (INPUT, LABEL))
    return TorchBatch(inputs, labels, tensors.get(WEIGHT), rows, tensors)


_RULES: Mapping[Any, str] = {
    **dict.fromkeys((nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss), "argmax"),
    **dict.fromkeys((F.cross_entropy, F.nll_loss, F.multi_margin_loss), "argmax"),
    **dict.fromkeys((nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits), "binary_logit"),
    **dict.fromkeys((nn.SoftMarginLoss, F.soft_margin_loss), "sign"),
    **dict.fromkeys((nn.BCELoss, F.binary_cross_entropy), "binary_probability"),
    **dict.fromkeys((nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss), "value"),
    **dict.fromkeys((nn.KLDivLoss, nn.MultiLabelSoftMarginLoss, F.kl_div, F.multilabel_soft_margin_loss), "value"),
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss), "value"),
}
"""The rule for a prediction from the output of torch's losses, which are classes and functions."""

_KNOWN = {*_RULES, *(nn.HingeEmbeddingLoss, F.hinge_embedding_loss, nn.MultiLabelMarginLoss, F.multilabel_margin_loss)}
"""The losses of torch that take an output and a label."""
_COUNTED = {nn.CrossEntropyLoss, F.cross_entropy, nn.NLLLoss, F.nll_loss}  # means over labels that are not ignored


def _unwrapped(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Return the module or function below `functools.partial`, and the keywords that were bound."""
    settings: dict[str, Any] = {}
    while isinstance(loss, functools.partial) and not loss.args:
        settings = {**loss.keywords, **settings}
        loss = loss.func
    return loss, settings


def rule(loss: Any) -> str | None:
    """Return the rule for a prediction from an output of this loss, as in the setting `prediction`; None: unknown."""
    loss, _ = _unwrapped(loss)
    kinds = [loss] if inspect.isroutine(loss) else type(loss).__mro__
    return next((_RULES[kind] for kind in kinds if kind in _RULES), None)


def _known(loss: Any) -> tuple[Any, Callable[[str, Any], Any]]:
    """Return which of torch's losses this is, None for a user's own, and a function that reads its settings."""
    inner, settings = _unwrapped(loss)
    if inspect.isroutine(inner):
        legacy = {"size_average", "reduce"} & settings.keys()  # they override reduction
        return (inner if inner in _KNOWN and not legacy else None), settings.get
    kind: Any = next((each for each in type(inner).__mro__ if each in _KNOWN), None)
    own = kind is None or settings or type(inner).forward is not kind.forward
    return (None if own else kind), lambda name, default: getattr(inner, name, default)


def label_dtype(loss: Any) -> str | None:
    """Return the type that this loss needs for scalar labels: INTEGER for class numbers, else FLOAT; None: unknown."""
    found = rule(loss)
    return None if found is None else INTEGER if found == "argmax" else FLOAT


class LossTerm:
    """One loss of one output and one label, as a sum over rows and the denominator of its mean, see `summed`."""

    def __init__(self, loss: Callable[..., Any], weighted: bool) -> None:
        kind, setting = _known(loss)
        self.name = getattr(kind or loss, "__name__", type(loss).__name__)
        self.own = kind is None
        self.rule = rule(loss)
        self.of_classes = self.rule == "argmax"
        reduction = getattr(loss, "reduction", "mean") if self.own else setting("reduction", "mean")
        self.is_sum = reduction == "sum"
        self.counted = kind in _COUNTED and reduction == "mean"  # see `_count`
        divided = self.counted or (reduction == "batchmean" and not self.own)
        self._adds = self.is_sum or divided  # what the loss returns is a sum over the elements of a row, or of all rows
        self._weight, self._ignored = setting("weight", None), setting("ignore_index", -100)
        self.factors = {} if self.own else {name: setting(name, None) for name in ("weight", "pos_weight")}
        """The factors of a loss of torch by element, perhaps None; they must not be those of a batch's rows."""
        self._loss = loss
        if weighted:
            self._loss = _with_reduction(loss, "none") or loss
        elif divided:
            self._loss = _with_reduction(loss, "sum") or loss

    def shaped(self, label: torch.Tensor, output: torch.Tensor, at: int) -> torch.Tensor:
        """Return the label in the shape that a loss of torch needs; a user's own loss gets it as its column has it."""
        if self.own or not isinstance(output, torch.Tensor):
            return label
        wanted = output.shape
        if self.of_classes and not (label.is_floating_point() and label.dim() == output.dim()):
            wanted = output.shape[:1] + output.shape[2:]
        label = like(label, wanted)
        if label.shape != wanted:
            raise DataError(
                f"{self.name} needs labels of shape {list(wanted)} for output {at} of shape {list(output.shape)}, and "
                f"label_{at} has the shape {list(label.shape)}; give each row the right shape by label_shapes, or "
                "change the model's output"
            )
        return label

    def _count(self, label: torch.Tensor) -> Number:
        if label.is_floating_point():  # a probability for each class, for which torch divides by the rows
            return float(label.numel() // label.shape[1])
        counted = label[label != self._ignored] if self._weight is not None else (label != self._ignored).sum()
        return number_of(counted if self._weight is None else self._weight[counted].sum())

    def __call__(
        self, output: torch.Tensor, label: torch.Tensor, weights: torch.Tensor | None, rows: int
    ) -> tuple[torch.Tensor, Number]:
        """Return the sum of the loss over the rows, and the denominator of its mean without sample weights."""
        total, count = summed(self.name, self._loss(output, label), rows, weights, adds=self._adds)
        if not self.counted:
            return total, count
        # by row, so that the denominator is the number of rows if no label is ignored, and no gradient need be scaled
        a_row = label.numel() // rows // (label.shape[1] if label.is_floating_point() else 1)
        return total / a_row, self._count(label) / a_row


class Objective:
    """The losses of a training and their weights, for a number of labels and perhaps sample weights."""

    def __init__(
        self,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
        train_fn: Callable[..., Any] | None,
        *,
        labels: int,
        weighted: bool,
        loss_weights: Sequence[float] | None = None,
        paired: bool | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._train_fn = train_fn
        self._precision = precision
        self.paired = paired  # `train_fn` returns (numerator, denominator); None: as each result looks
        self._step = train_fn if isinstance(train_fn, ModelStep) else None
        self._frozen: list[torch.nn.Module] = []  # submodules that are in eval mode in a model in training mode
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
        self.coupled = count > 1 and any(term.own or term.counted for term in self.terms)
        """Several losses may have denominators of their own, which `share` needs: the `counts` of all results."""

    def __len__(self) -> int:
        return max(1, len(self.terms))

    def rule(self, which: int | None) -> str | None:
        """Return the rule for predictions from output number `which`, or from the only one; None if unknown."""
        if which is None:
            return self.terms[0].rule if len(self.terms) == 1 else None
        return self.terms[which].rule if 0 <= which < len(self.terms) else None

    def set_mode(self, model: torch.nn.Module, training: bool) -> None:
        """Put the model in training mode or in eval mode; called before steps, also again in a new world.

        Submodules that are in eval mode while the model is in training mode stay in it: a frozen part stays frozen.
        """
        if model.training:
            self._frozen = [each for each in model.modules() if not each.training]
        model.train(training)
        for each in self._frozen if training else ():
            each.training = False

    def prepare(self, model: torch.nn.Module, position: StepPosition) -> None:
        if self._step is not None:
            self._step.prepare(model, position)

    def forward(self, model: torch.nn.Module, batch: TorchBatch) -> ForwardResult:
        """Run the forward pass and the losses; raise DataError if outputs and losses do not match.

        Outputs in half precision become float32, for the losses and metrics.
        """
        if self._precision is nullcontext:
            return self._forward(model, batch)
        with self._precision():
            result = self._forward(model, batch)
            return replace(result, outputs=tuple(map(full, result.outputs)))

    def _forward(self, model: torch.nn.Module, batch: TorchBatch) -> ForwardResult:
        if self._step is not None:
            return self._step(model, batch)
        if self._train_fn is not None:
            return self._forward_by_train_fn(self._train_fn, model, batch)
        outputs = tuple(map(full, outputs_of(model(*batch.inputs))))
        if len(outputs) < len(self.terms):
            raise DataError(f"the model has {len(outputs)} outputs and there are {len(self.terms)} losses")
        pairs = []
        for at, term in enumerate(self.terms):
            label = batch.labels[at] if batch.labels else batch.inputs[0]
            label = term.shaped(label, outputs[at], at)
            try:
                pairs.append(term(outputs[at], label, batch.weights, batch.rows))
            except Exception as error:
                if term.own and (hint := self.hint(outputs)):
                    log.warning("the loss %s failed; %s", term.name, hint)
                if not isinstance(error, IndexError):
                    raise
                if not term.of_classes or not label.numel():
                    raise DataError(f"{term.name} of label_{at}: {error}") from error
                raise DataError(
                    f"{term.name}: label_{at} (label column number {at}, from 0) has values from {label.min().item()} "
                    f"to {label.max().item()} in this batch, and output {at} is of shape {tuple(outputs[at].shape)}: "
                    f"{error}"
                ) from error
        return ForwardResult(outputs, batch.labels, [total for total, _ in pairs], [count for _, count in pairs])

    def hint(self, outputs: Sequence[Any]) -> str:
        """Return what to do if a loss was meant to get several outputs; "" if the model has no more than losses."""
        if self._train_fn is not None or len(outputs) <= len(self.terms):
            return ""
        return (
            f"the model returns {len(outputs)} outputs, and a loss gets the one of its label alone, the first for the "
            "first; a train_fn calls the model itself, and has all outputs"
        )

    def _forward_by_train_fn(self, train_fn: Any, model: torch.nn.Module, batch: TorchBatch) -> ForwardResult:
        returned = train_fn(model, batch)
        loss, outputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, ())
        learns = torch.is_grad_enabled()
        constant = not (isinstance(outputs, torch.Tensor) and outputs.requires_grad)
        number = isinstance(outputs, (int, float)) or (isinstance(outputs, torch.Tensor) and outputs.dim() == 0)
        pair = not isinstance(loss, tuple) and number and constant if self.paired is None else self.paired
        if learns and batch.rows > 1:  # of one row, or without gradients, outputs may look like a denominator
            self.paired = pair
        if pair:
            loss, outputs = returned, ()
        by_row = isinstance(loss, torch.Tensor) and loss.shape == (batch.rows,) and batch.rows > 1
        either = by_row and isinstance(outputs, torch.Tensor) and outputs.shape == loss.shape and learns and constant
        if either or (isinstance(loss, torch.Tensor) and loss.numel() != 1 and not by_row):
            raise DataError(
                "train_fn must return a loss or (loss, outputs), where the loss is one value, a value for each row, or "
                "(numerator, denominator); without outputs as ((numerator, denominator), ()). It returned "
                f"{returned!r:.200}"
            )
        total, count = summed("train_fn", loss, batch.rows)
        return ForwardResult(outputs_of(outputs), batch.labels, [total], [count])

    def share(self, result: ForwardResult, global_rows: int, global_counts: Sequence[Number] = ()) -> torch.Tensor:
        """Return this worker's share of the batch's loss, a scalar for `backward`; the shares of all add up to it.

        They do so up to the `scale` of their gradients. `coupled` losses need `global_counts`: the sum of all `counts`.
        """
        divisors = [count or 1.0 for count in global_counts] or [float(global_rows)] * len(self)
        for at, term in enumerate(self.terms):
            if term.is_sum:
                divisors[at] = 1.0
        parts = zip(result.sums, self.weights, divisors, strict=True)
        return functools.reduce(torch.add, [value * (weight / divisor) for value, weight, divisor in parts])

    def scale(self, counts: Sequence[float], global_rows: int) -> float:
        """Return the factor by which the sum of all gradients becomes that of the batch's loss.

        `counts` are those of all results of the batch, added up.
        """
        if self.coupled or len(self) > 1 or not counts[0] or any(term.is_sum for term in self.terms):
            return 1.0
        return global_rows / counts[0]

    def means(self, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return the columns "loss" and, of several losses, "loss_0", ...; none if a `ModelStep` computed no loss."""
        if self._step is not None and not any(counts):
            return {}
        each = [value / count if count else float("nan") for value, count in zip(sums, counts, strict=True)]
        total = sum(weight * value for weight, value in zip(self.weights, each, strict=True))
        return {"loss": total, **({f"loss_{at}": value for at, value in enumerate(each)} if len(each) > 1 else {})}


def full(output: Any) -> Any:
    """Return an output that autocast has made in half precision in full precision, others as they are."""
    half = isinstance(output, torch.Tensor) and output.dtype in (torch.float16, torch.bfloat16)
    return output.float() if half and torch.is_autocast_enabled(output.device.type) else output


def like(label: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the label in this shape, if the two differ by a last axis of 1 alone; else as it is."""
    shape = tuple(shape)
    return label.reshape(shape) if shape in ((*label.shape, 1), label.shape[:-1]) and shape != label.shape else label


def outputs_of(value: Any) -> tuple[Any, ...]:
    """Return the outputs of a module that returned one value, or several in a tuple, list or mapping."""
    if isinstance(value, Mapping):
        return tuple(value.values())
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _with_reduction(loss: Any, reduction: str) -> Callable[..., Any] | None:
    """Return the same loss with another reduction; None if its reduction cannot be chosen."""
    inner, _ = _unwrapped(loss)
    if isinstance(inner, torch.nn.Module) and hasattr(inner, "reduction"):
        other: Any = copy.copy(inner)
        other.reduction = reduction
        return other  # type: ignore[no-any-return]
    try:
        if "reduction" in inspect.signature(loss).parameters:
            return functools.partial(loss, reduction=reduction)
    except (TypeError, ValueError):  # builtins have no signature
        pass
    return None

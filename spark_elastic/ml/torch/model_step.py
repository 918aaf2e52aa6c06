"""One call of a model with a batch: its rows and its result, and models that decide themselves how they are called.

`ModelStep` is the base of the `train_fn` for such models: `lightning.LightningStep`, `transformers.ModelLoss`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from spark_elastic.errors import DataError

Number = float | torch.Tensor
"""A number, or a tensor of float64 with one that is on a GPU."""
READ_AT_ONCE = ("cpu", "mps")
"""The types of devices from which numbers are read as they are made. MPS has no float64."""


def number_of(value: torch.Tensor) -> Number:
    """Return the number of a tensor that has one; leave it on a GPU, since reading it would wait for all work there."""
    return float(value) if value.device.type in READ_AT_ONCE else value.detach().reshape(()).double()


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """Rows of one worker, on the device of the training. `batch["features_0"]` is a tensor by its name."""

    inputs: tuple[torch.Tensor, ...]  # the inputs of the model, tensors of shape [rows, ...], as are `labels`
    labels: tuple[torch.Tensor, ...]
    weights: torch.Tensor | None  # the sample weights, shape [rows]; None: the dataset has none
    rows: int
    tensors: Mapping[str, Any]  # all tensors by name, including those that `transformation_fn` has added

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


class LoggedName(NamedTuple):
    """The name of a value that a model logs, and whether it does so in validation."""

    name: str
    validation: bool


class LoggedValue(NamedTuple):
    """A value that a model has logged, and its weight in the mean of an epoch, such as the number of rows."""

    value: Any  # the sum over the rows; or a torchmetrics metric with the states of these rows, until the next step
    rows: float


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The outputs, labels and losses of one forward pass."""

    outputs: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...]
    sums: list[torch.Tensor]  # the sum of each loss over the rows: scalars with a graph
    counts: list[Number]  # the denominator of each sum's mean: the rows, or what the loss divides by instead
    logged: Mapping[LoggedName, LoggedValue] = field(default_factory=dict)  # values that the model has logged
    rule: str | None = None  # the rule for a prediction from the first output, if the model decides it


@dataclass(frozen=True, slots=True)
class StepPosition:
    """The position of a step in the training: `step` optimizer steps so far, batch number `index` of this epoch."""

    epoch: int = 0
    step: int = 0
    index: int = 0
    rank: int = 0
    size: int = 1
    local_rank: int = 0


def summed(
    name: str, value: Any, rows: int, weights: torch.Tensor | None = None, adds: bool = False
) -> tuple[torch.Tensor, Number]:
    """Return a loss that was computed of some rows as the sum over them, and the denominator of its mean.

    `value` is the mean over the rows, or with `adds` a sum; a value, or several, for each of them; or (numerator,
    denominator). Sample weights need a value or a numerator for each row. Raises DataError if it is something else.
    """
    count: Number = float(rows)
    if weights is not None and weights.shape != (rows,):
        if weights.numel() != rows:
            raise DataError(f"sample weights of shape {list(weights.shape)} for {rows} rows; give each row one number")
        weights = weights.reshape(rows)
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value, denominator = value
        if isinstance(denominator, torch.Tensor) and denominator.requires_grad:
            raise DataError(
                f"{name} returned two values, and the second, a denominator, depends on the model's parameters, which "
                "would not be trained through it; return the loss alone, or detach the denominator"
            )
        count, adds = number_of(torch.as_tensor(denominator).sum()), True
    if isinstance(value, torch.Tensor):
        if value.dim() and value.shape[0] == rows:
            values = value.reshape(rows, -1)
            by_row = values.sum(1) if adds else values.mean(1)
            return (by_row.sum() if weights is None else by_row @ weights.to(by_row.dtype)), count
        if value.numel() == 1 and weights is None:
            return (value.reshape(()) if adds else value.reshape(()) * rows), count
    found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.200}"
    wanted = "with sample weights it has to return" if weights is not None else "it has to return their mean, or"
    raise DataError(
        f"{name} returned {found} for {rows} rows; {wanted} a value for each row, or (numerator, denominator)"
    )


class ModelStep(ABC):
    """A `train_fn` for a kind of models that compute their own loss, and may decide other settings as well."""

    name = "the model and its loss"  # what an error calls the step
    decides: tuple[str, ...] = ()  # the settings that the model decides, which must not be set
    makes_optimizer = False  # `configured` returns an optimizer
    label_dtype: str | None = None  # the type of labels that are numbers; None: as in their columns
    takes_functions = False  # the model may be a function that makes it
    exact = False  # a call depends on the model's tensors and on its rows alone, as consistency='exact' needs it

    def configured(self, model: Any, epochs: int, steps_an_epoch: int | None) -> dict[str, Any]:
        """Return settings of `TorchTraining` that follow from the model and the number of steps, if that is fixed."""
        return {}

    def compiled(self, model: Any) -> torch.nn.Module:
        """Return the module to compile, which the step calls."""
        return model  # type: ignore[no-any-return]

    def prepare(self, model: Any, position: StepPosition) -> None:  # noqa: B027 (does nothing unless a step overrides it)
        """Prepare for the calls of one step, in training mode, or of one batch of a validation, in eval mode."""

    @abstractmethod
    def __call__(self, model: Any, batch: TorchBatch) -> ForwardResult:
        """Call the model with some rows. In eval mode there may be no loss: a count of 0."""


def model_step_of(train_fn: Any) -> ModelStep | None:
    """Return the `train_fn` of a model that decides how it is trained; None for other models."""
    return train_fn if isinstance(train_fn, ModelStep) else None

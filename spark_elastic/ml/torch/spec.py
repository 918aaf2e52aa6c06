"""The settings of one training of a module, as the estimator sends them to every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.training.spec import Training

if TYPE_CHECKING:
    import torch

MODEL_FILE = "model.pt"
"""The file in the run's store with the `state_dict` of the trained model, for `torch.load(..., weights_only=True)`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchTraining(Training):
    """One training of a PyTorch module; `Training` describes the settings that every framework has.

    It is pickled as a whole, so that the model and an optimizer instance still share the parameters in a worker.

    Attributes:
        model: the module, on the CPU.
        optimizer: an instance on the model's parameters, a class, or a function of the parameters that returns one.
        loss: a function of (output, label), or one for each label. None: `train_fn` computes the loss.
        loss_weights: factors of the losses in the total loss.
        train_fn: a function of (model, TorchBatch) that returns the loss, or (loss, outputs) if metrics need the
            outputs. The loss is a mean over the rows of the batch. It is also called for validation, without gradients
            and in eval mode.
        metrics: metrics by name. Each is a torchmetrics metric, or a function of (output, label) that returns the mean
            over the rows or a value for each row. With several outputs, output and label are tuples; give
            (index, metric) for a metric of one output.
        lr_scheduler: an instance on the optimizer, or a function of the optimizer that returns one.
        scheduler_interval: "epoch" or "step": when the scheduler steps. ReduceLROnPlateau steps every epoch.
        scheduler_monitor: the column of the history that ReduceLROnPlateau follows.
        callbacks: callbacks, which run in every worker in this order.
        device: "cpu", "cuda" (the GPU of the local rank), "cuda:1", ... None: a GPU where there is one.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[[list[Any]], torch.optim.Optimizer]
    loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    loss_weights: Sequence[float] | None = None
    train_fn: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    lr_scheduler: Any = None
    scheduler_interval: str = "epoch"
    scheduler_monitor: str | None = None
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        Training.__post_init__(self)  # super() does not work in a dataclass with slots
        if (self.loss is None) == (self.train_fn is None):
            raise InvalidSettingsError("give either loss or train_fn")
        if self.loss_weights is not None and self.loss is None:
            raise InvalidSettingsError("loss_weights need losses; with train_fn, weigh the losses in that function")
        if self.scheduler_interval not in ("epoch", "step"):
            raise InvalidSettingsError(f'scheduler_interval must be "epoch" or "step", not {self.scheduler_interval!r}')

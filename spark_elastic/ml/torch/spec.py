"""Everything that a worker needs to know of a training. The estimator fills it in; `training.train` does it."""

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
"""In the run's store: the `state_dict` of the trained model, for `torch.load(..., weights_only=True)`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchTraining(Training):
    """One training of a module; it is pickled as a whole: so a model and an optimizer instance keep their parameters in
    common. What is not said here is said in `Training`.

    model: on the CPU.
    optimizer: an instance on the model's parameters, a class, or a function of the parameters that returns one.
    loss: of (output, label); one, or one for each label. None: `train_fn` computes it.
    loss_weights: by which the losses are multiplied before they are added up.
    train_fn: (model, TorchBatch) -> loss, or (loss, outputs), where metrics are to see the outputs. The loss is a mean
        over the rows of this batch. Also used for validation, without gradients and in eval mode.
    metrics: by name: a function of (output, label) that returns a mean over the rows, or a value for each row; or a
        torchmetrics metric. With several outputs both are tuples; (index, metric) means one of them.
    lr_scheduler: an instance on the optimizer, or a function of the optimizer that returns one. scheduler_interval:
        "epoch" or "step"; one that takes a metric (ReduceLROnPlateau) steps every epoch with scheduler_monitor.
    callbacks: run in every worker, in this order.
    device: "cpu", "cuda" (that of the local rank), "cuda:1", ... None: cuda where there is one.
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
        Training.__post_init__(self)  # super() does not work in a class with slots
        if (self.loss is None) == (self.train_fn is None):
            raise InvalidSettingsError("give either loss or train_fn")
        if self.loss_weights is not None and self.loss is None:
            raise InvalidSettingsError("loss_weights need losses; a train_fn adds its own up")
        if self.scheduler_interval not in ("epoch", "step"):
            raise InvalidSettingsError(f'scheduler_interval must be "epoch" or "step", not {self.scheduler_interval!r}')

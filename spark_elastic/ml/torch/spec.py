"""The settings of one training of a module, and the optimizer and learning rate schedule that follow from them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.callbacks import Callback, validation_hint
from spark_elastic.ml.torch.model_function import ModelFunction
from spark_elastic.ml.torch.model_step import LoggedName
from spark_elastic.ml.training.spec import Training

MODEL_FILE = "model.pt"
"""The file in the run's store with the `state_dict` of the trained model, without its frozen parameters."""


def global_config() -> dict[str, Any]:
    """Return the global settings of torch that a model's results depend on."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchTraining(Training):
    """One training of a PyTorch module; `Training` describes the settings that every framework has.

    It is pickled as a whole, so that the model and an optimizer instance still share the parameters in a worker. Fields
    that are not explained here are settings of `ElasticTorchEstimator`.

    Attributes:
        model: a `torch.nn.Module`; a `ModelFunction` until `building.built` has called it.
        made_by: the function that has made the model in this process; None if a module was given.
        frozen: digests of the parameters that are not trained, by name; None until `building.built` has found them.
        moved: the names of those that the model's own steps change, as of a momentum encoder.
        loss: as of the estimator. One of torch gets labels with or without a last axis of 1, as it needs them, another
            one as their columns have them; see `objective.LossTerm` for what it may return.
        train_fn: as of the estimator. It is also called for validation, without gradients and in eval mode.
        metrics: metrics by name. With several outputs, output and label are tuples; (index, metric) is for one output.
        logged: the values that the model logs itself: by name a torchmetrics metric, or None for a number.
        config: global settings of torch by name, such as "default_dtype", as they are where the model was made.
    """

    model: Any
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[[list[Any]], torch.optim.Optimizer]
    loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    loss_weights: Sequence[float] | None = None
    train_fn: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    lr_scheduler: Any = None
    scheduler_interval: str = "epoch"
    scheduler_monitor: str | None = None
    callbacks: Sequence[Callback] = ()
    logged: Mapping[LoggedName, Any] = field(default_factory=dict)
    paired: bool | None = None  # train_fn returns (numerator, denominator), not (loss, outputs); None: not known yet
    virtual_workers: int | None = None  # None: the workers share each batch
    amp: str | None = None
    compile: bool | str = False
    generators: Sequence[Any] = ()
    config: Mapping[str, Any] = field(default_factory=global_config)
    made_by: ModelFunction | None = None
    frozen: Mapping[str, str] | None = None
    moved: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.virtual_workers is not None:  # batch normalisation takes the statistics of each shard
            object.__setattr__(self, "sync_batch_norm", False)


def build_optimizer(given: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the given optimizer, or the one that a given class or function makes of the model's parameters."""
    params = list(model.parameters())
    if not params:
        raise InvalidSettingsError(f"the model ({type(model).__name__}) has no parameters that could be trained")
    try:
        optimizer = given if isinstance(given, torch.optim.Optimizer) else given(params)
    except (AttributeError, TypeError) as error:
        raise InvalidSettingsError(
            f"optimizer, called with the list of the model's parameters, raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidSettingsError(
            f"optimizer must be a torch optimizer, its class, or a function of the parameters that returns one; "
            f"it gave {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidSettingsError(
            "LBFGS evaluates the loss several times a step, which a training by batches does not allow; choose another "
            "optimizer"
        )
    check_parameters(optimizer, model)
    return optimizer


def check_compiler(given: bool | str) -> None:
    """Raise `InvalidSettingsError` if torch.compile knows no such backend."""
    try:
        if isinstance(given, str):
            torch.compile(torch.nn.Identity().forward, backend=given)
    except RuntimeError as error:
        raise InvalidSettingsError(f"compile={given!r} is no backend of torch.compile here: {error}") from None


def check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    own = {id(param) for param in model.parameters()}
    foreign = sum(id(param) not in own for group in optimizer.param_groups for param in group["params"])
    if foreign:
        raise InvalidSettingsError(
            f"{foreign} of the optimizer's parameters are not the model's: it was made for another module. Give a "
            "function of the parameters instead, which works with any model: "
            f"lambda params: torch.optim.{type(optimizer).__name__}(params, lr={optimizer.defaults.get('lr')}). "
            "Parameters of a loss are trained only as a part of the model, with a train_fn that calls both"
        )


class LearningRateSchedule:
    """The learning rate scheduler, None for a constant rate; raise InvalidSettingsError if it does not fit the rest."""

    def __init__(self, training: TorchTraining, optimizer: torch.optim.Optimizer) -> None:
        given = training.lr_scheduler
        self.scheduler: Any = given
        if given is not None and (isinstance(given, type) or not hasattr(given, "step")):
            self.scheduler = given(optimizer)
        if self.scheduler is not None and not hasattr(self.scheduler, "state_dict"):
            raise InvalidSettingsError(f"lr_scheduler is {type(self.scheduler).__name__}, which is not a scheduler")
        if getattr(self.scheduler, "optimizer", optimizer) is not optimizer:
            raise InvalidSettingsError(
                "lr_scheduler belongs to another optimizer; give a function of the optimizer that returns a scheduler"
            )
        self._by_step = training.scheduler_interval == "step"
        self._plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self._plateau and self._by_step:
            raise InvalidSettingsError(
                "scheduler_interval='step' with ReduceLROnPlateau, which follows a value of whole epochs"
            )
        if not self._plateau and training.scheduler_monitor is not None:
            raise InvalidSettingsError(
                f"scheduler_monitor={training.scheduler_monitor!r} with {type(self.scheduler).__name__}, which follows "
                "no value"
            )
        self._monitor = training.scheduler_monitor or ("val_loss" if training.validates else "loss")
        self._warns = self.scheduler is not None  # torch may warn at the next step; see `_step`

    def after_step(self) -> None:
        if self.scheduler is not None and self._by_step:
            self._step()

    def after_epoch(self, logs: Mapping[str, float]) -> None:
        """Let a scheduler of epochs step; raise InvalidSettingsError if the logs lack the monitored column."""
        if self.scheduler is None or self._by_step:
            return
        if not self._plateau:
            self._step()
            return
        if self._monitor not in logs:
            hint = validation_hint(self._monitor, logs)
            raise InvalidSettingsError(f"scheduler_monitor={self._monitor!r} is not one of {', '.join(logs)}{hint}")
        self._step(logs[self._monitor])

    def _step(self, *args: float) -> None:
        if not self._warns:
            self.scheduler.step(*args)
            return
        # Each scheduler of a SequentialLR has a first step, at a later step of the whole.
        self._warns = hasattr(self.scheduler, "_schedulers")
        with warnings.catch_warnings():
            # The scheduler watches the user's optimizer; the distributed optimizer with the same parameter groups
            # steps. So torch warns at the first step that the scheduler steps before its optimizer: a false alarm.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
            warnings.filterwarnings("ignore", message=".*optimizer.step.*")
            self.scheduler.step(*args)

"""Build the optimizer and its learning rate schedule from the user's settings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.torch.spec import TorchTraining


def build_optimizer(given: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that was given, or that a class or function makes of the model's parameters.

    Raises:
        InvalidSettingsError: the result is not an optimizer, has parameters of another model, or evaluates the loss
            several times a step.
    """
    params = list(model.parameters())
    if not params:
        raise InvalidSettingsError(f"the model ({type(model).__name__}) has no parameters that could be trained")
    optimizer = given if isinstance(given, torch.optim.Optimizer) else given(params)
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
    own = {id(param) for param in model.parameters()}
    foreign = sum(id(param) not in own for group in optimizer.param_groups for param in group["params"])
    if foreign:
        raise InvalidSettingsError(
            f"{foreign} of the optimizer's parameters are not the model's; make the optimizer from the parameters of "
            "this very model, or give its class or a function of the parameters"
        )
    return optimizer


class LearningRateSchedule:
    """The learning rate scheduler of a training, and when it steps.

    Attributes:
        scheduler: torch's scheduler; None: the learning rate is constant.

    Raises:
        InvalidSettingsError: the scheduler does not go with the optimizer or the other settings.
    """

    def __init__(self, training: TorchTraining, optimizer: torch.optim.Optimizer) -> None:
        given = training.lr_scheduler
        self.scheduler: Any = given
        if given is not None and (isinstance(given, type) or not hasattr(given, "step")):
            self.scheduler = given(optimizer)
        if self.scheduler is not None and not hasattr(self.scheduler, "state_dict"):
            raise InvalidSettingsError(f"lr_scheduler is {type(self.scheduler).__name__}, which is not a scheduler")
        own = getattr(self.scheduler, "optimizer", optimizer)
        if own is not optimizer:
            raise InvalidSettingsError(
                "lr_scheduler belongs to another optimizer; give a function of the optimizer that returns a scheduler"
            )
        self._plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if self._plateau and training.scheduler_interval == "step":
            raise InvalidSettingsError(
                "scheduler_interval='step' with ReduceLROnPlateau, which follows a value of whole epochs"
            )
        if not self._plateau and training.scheduler_monitor is not None:
            raise InvalidSettingsError(
                f"scheduler_monitor={training.scheduler_monitor!r} with {type(self.scheduler).__name__}, which follows "
                "no value"
            )
        self._by_step = training.scheduler_interval == "step"
        self._monitor = training.scheduler_monitor or ("val_loss" if training.validates else "loss")
        self._stepped = False

    def after_step(self) -> None:
        if self.scheduler is not None and self._by_step:
            self._step()

    def after_epoch(self, logs: Mapping[str, float]) -> None:
        """Step by epoch; raise InvalidSettingsError if the logs do not have the monitored column."""
        if self.scheduler is None or self._by_step:
            return
        if not self._plateau:
            self._step()
            return
        if self._monitor not in logs:
            raise InvalidSettingsError(f"scheduler_monitor={self._monitor!r} is not one of {', '.join(logs)}")
        self._step(logs[self._monitor])

    def _step(self, *args: float) -> None:
        if self._stepped:
            self.scheduler.step(*args)
            return
        self._stepped = True
        with warnings.catch_warnings():
            # The scheduler watches the user's optimizer; the distributed optimizer with the same parameter groups
            # steps. So torch warns at the first step that the scheduler steps before its optimizer: a false alarm.
            warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
            warnings.filterwarnings("ignore", message=".*optimizer.step.*")
            self.scheduler.step(*args)

"""What `configure_optimizers` of a LightningModule returned, as settings of a training."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from spark_elastic.errors import InvalidSettingsError

_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


def settings_of(returned: Any, steps_an_epoch: int | None) -> dict[str, Any]:
    """Return optimizer and schedule as settings of the estimator; raise InvalidSettingsError if that is impossible."""
    optimizers, schedulers = _lists_of(returned)
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise InvalidSettingsError(
            f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} schedulers, but a "
            "training has one optimizer and at most one scheduler. Parameter groups of one optimizer can have "
            "different rates, and torch.optim.lr_scheduler.ChainedScheduler and SequentialLR join schedulers"
        )
    if not isinstance(optimizers[0], torch.optim.Optimizer):
        raise InvalidSettingsError(
            f"configure_optimizers must return a torch optimizer, alone, in a dict or in a list, not {returned!r:.200}"
        )
    return {"optimizer": optimizers[0], **(_schedule(schedulers[0], steps_an_epoch) if schedulers else {})}


def _lists_of(returned: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedulers, in any of the forms that Lightning accepts."""
    if returned is None:
        return [], []
    if isinstance(returned, Mapping):
        scheduler = returned.get("lr_scheduler")
        if scheduler is not None and not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler, "monitor": returned.get("monitor")}
        return [returned.get("optimizer")], [] if scheduler is None else [scheduler]
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            first, second = returned
            return list(first), list(second) if isinstance(second, (list, tuple)) else [second]
        pairs = [_lists_of(each) for each in returned]
        return [one for pair in pairs for one in pair[0]], [one for pair in pairs for one in pair[1]]
    return [returned], []


def _schedule(given: Any, steps_an_epoch: int | None) -> dict[str, Any]:
    options: Mapping[str, Any] = given if isinstance(given, Mapping) else {"scheduler": given}
    scheduler, interval, every = (options.get(name) for name in ("scheduler", "interval", "frequency"))
    interval, every = "epoch" if interval is None else interval, 1 if every is None else every
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    if not hasattr(scheduler, "step") or not hasattr(scheduler, "state_dict"):
        raise InvalidSettingsError(f"configure_optimizers returned {scheduler!r:.200} as a scheduler")
    if unknown := options.keys() - _KEYS:
        raise InvalidSettingsError(
            f"configure_optimizers returned a scheduler with {', '.join(map(repr, sorted(unknown)))}; there are "
            f"{', '.join(map(repr, sorted(_KEYS)))}"
        )
    if interval not in ("epoch", "step"):
        raise InvalidSettingsError(f"the interval of a scheduler must be 'epoch' or 'step', not {interval!r}")
    if options.get("reduce_on_plateau", plateau) != plateau:
        raise InvalidSettingsError("reduce_on_plateau can be set for torch's ReduceLROnPlateau alone")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InvalidSettingsError(f"the frequency of a scheduler must be a whole number of at least 1, not {every!r}")
    if every > 1 and (plateau or (interval == "step" and steps_an_epoch is None)):
        raise InvalidSettingsError(
            f"a scheduler with frequency={every} is not possible with "
            f"{'ReduceLROnPlateau' if plateau else 'per_worker_batch_size; set batch_size instead'}"
        )
    restart = steps_an_epoch if interval == "step" else None
    return {
        "lr_scheduler": scheduler if every == 1 else EveryNthStep(scheduler, every, restart),
        "scheduler_interval": interval,
        **({"scheduler_monitor": options.get("monitor")} if plateau else {}),
    }


class EveryNthStep:
    """Steps another scheduler at every nth own step (Lightning's `frequency`); counts from 0 again after `restart`."""

    def __init__(self, scheduler: Any, every: int, restart: int | None) -> None:
        self.scheduler, self.every, self.restart, self.calls = scheduler, every, restart, 0

    def __repr__(self) -> str:  # in the description of a training that checkpoints are compared with
        return f"EveryNthStep({type(self.scheduler).__name__}, {self.scheduler.state_dict()})"

    @property
    def optimizer(self) -> Any:
        return self.scheduler.optimizer

    def step(self) -> None:
        self.calls += 1
        position = self.calls if self.restart is None else (self.calls - 1) % self.restart + 1
        if position % self.every == 0:
            with warnings.catch_warnings():
                # a false alarm, see `spec.LearningRateSchedule`; here a later step may be the first
                warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
                self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]
        self.scheduler.load_state_dict(state["scheduler"])

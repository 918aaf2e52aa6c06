"""LightningModules in an estimator: what they may override, and their steps; without importing lightning.

`check_module` reads a module on the driver. `LightningStep` is the `train_fn` of its training: it calls
`configure_optimizers` on the driver, and `training_step` and `validation_step` in the workers.
"""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.torch.model_step import (
    ForwardResult,
    LoggedName,
    LoggedValue,
    ModelStep,
    StepPosition,
    TorchBatch,
    number_of,
    summed,
)

log = logging.getLogger("spark_elastic.ml")


_CALLED = {"on_train_epoch_start"}
_CHANGES_RESULT = (
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward", "configure_gradient_clipping"),
    *("configure_model", "configure_sharded_model", "on_before_batch_transfer", "on_after_batch_transfer"),
    *("transfer_batch_to_device", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
"""Methods that change what a step computes. A training that left them out would give another model."""
_NOT_CALLED = (
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "test_step"),
    *("setup", "teardown", "prepare_data", "configure_callbacks"),
)


def lightning_class(module: Any) -> type | None:
    """Return the class LightningModule, of any package, that a module derives from; None if there is none."""
    return next((each for each in type(module).__mro__ if each.__name__ == "LightningModule"), None)


def overrides(module: Any, name: str) -> bool:
    """Return whether the module's own class defines a method of LightningModule."""
    base = lightning_class(module)
    return getattr(type(module), name, None) is not getattr(base, name, None)


def check_module(module: Any) -> None:
    """Warn of methods that are not called. Raise `InvalidSettingsError` if the module cannot be trained as it is."""
    kind = type(module).__name__
    base = lightning_class(module)
    if base is None or not isinstance(module, torch.nn.Module):
        raise InvalidSettingsError(f"from_lightning needs a LightningModule, not {module!r:.200}")
    if not getattr(module, "automatic_optimization", True):
        raise InvalidSettingsError(
            f"{kind} has automatic_optimization=False, but an estimator does the optimizer's steps itself. Let "
            "training_step return the loss, or train with spark_elastic.run and a loop of your own"
        )
    for name in ("training_step", "configure_optimizers"):
        if not overrides(module, name):
            raise InvalidSettingsError(f"{kind} has no {name}, which from_lightning needs")
    changes = [name for name in _CHANGES_RESULT if overrides(module, name)]
    if changes:
        raise InvalidSettingsError(
            f"{kind} overrides {', '.join(changes)}, which an estimator does not call, so that the trained model would "
            "be another one. Remove it: gradients are clipped by gradient_clip_norm and gradient_clip_value, columns "
            "are changed by transformation_fn, and all else can be done in training_step"
        )
    hooks = [name for name in dir(base) if name.startswith("on_")]
    ignored = [name for name in (*hooks, *_NOT_CALLED) if name not in _CALLED and overrides(module, name)]
    if ignored:
        log.warning(
            "%s overrides %s, which this training does not call: rows come from the DataFrame, self.log in "
            "training_step and validation_step makes columns of the history, and callbacks=[...] run at other moments",
            kind,
            ", ".join(sorted(ignored)),
        )


class ModuleTrainer:
    """The `self.trainer` of a module: those attributes of Lightning's Trainer that have a meaning here."""

    logger = None
    progress_bar_callback = None
    sanity_checking = False
    barebones = False
    max_steps = -1
    accumulate_grad_batches = 1
    current_epoch = 0
    global_step = 0

    def __init__(self, epochs: int, steps_an_epoch: int | None) -> None:
        self.loggers: list[Any] = []
        self.max_epochs = epochs
        self._steps_an_epoch = steps_an_epoch

    def update(self, position: StepPosition, training: bool) -> None:
        self.current_epoch, self.global_step = position.epoch, position.step
        self.global_rank, self.world_size, self.is_global_zero = position.rank, position.size, position.rank == 0
        self.local_rank = position.local_rank
        self.training, self.validating = training, not training

    @property
    def num_training_batches(self) -> int:
        if self._steps_an_epoch is None:
            raise InvalidSettingsError(
                "the number of steps depends on the number of workers with per_worker_batch_size, so self.trainer "
                "cannot tell it; set batch_size instead"
            )
        return self._steps_an_epoch

    @property
    def estimated_stepping_batches(self) -> int:
        return self.num_training_batches * self.max_epochs

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer.{name} does not exist in a training by ElasticTorchEstimator; there are current_epoch, "
            "global_step, max_epochs, num_training_batches, estimated_stepping_batches, and in the steps global_rank, "
            "local_rank, world_size, is_global_zero, training, validating"
        )


class LightningStep(ModelStep):
    """Calls `training_step` of a LightningModule, and in eval mode its `validation_step`.

    A step gets `(features, labels)`, with sample weights `(features, labels, weights)`, and without labels the features
    alone. Several inputs, or several labels, are a tuple.
    """

    decides = (
        *("optimizer", "lr_scheduler", "scheduler_interval", "scheduler_monitor"),
        *("loss", "loss_weights", "metrics", "compile"),
    )
    makes_optimizer = True
    name = "the LightningModule"

    def __init__(self, epochs: int = 1, steps_an_epoch: int | None = None) -> None:
        self._planned = epochs, steps_an_epoch
        self._trainer = ModuleTrainer(epochs, steps_an_epoch)
        self._index = 0
        self._begun: int | None = None  # the epoch whose `on_train_epoch_start` was called in this process

    def __reduce__(self) -> Any:
        return LightningStep, self._planned

    def configured(self, model: Any, epochs: int, steps_an_epoch: int | None) -> dict[str, Any]:
        module = copy.copy(model)  # with the same parameters; several fits may do this at the same time
        module.__dict__["_trainer"] = ModuleTrainer(epochs, steps_an_epoch)
        returned = module.configure_optimizers()
        module.__dict__["_trainer"] = None
        return {
            "model": module,  # it has the attributes that configure_optimizers has set
            "train_fn": LightningStep(epochs, steps_an_epoch),
            **settings_of(returned, steps_an_epoch),
        }

    def prepare(self, model: Any, position: StepPosition) -> None:
        self._index = position.index
        self._trainer.update(position, model.training)
        if not model.training:
            return
        if position.index == 0:  # also when this step is repeated, because then the tensors are as they were before it
            self._begin_epoch(model, position.epoch)
        elif self._begun != position.epoch:  # this worker has joined, and has got tensors that the method has changed
            tensors = [*model.parameters(), *model.buffers()]
            before = [tensor.detach().clone() for tensor in tensors]
            self._begin_epoch(model, position.epoch)
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

    def _begin_epoch(self, model: Any, epoch: int) -> None:
        self._begun = epoch
        with self._attached(model, _Log(False, 0, ())):
            model.on_train_epoch_start()

    def __call__(self, model: Any, batch: TorchBatch) -> ForwardResult:
        name = "training_step" if model.training else "validation_step"
        if not overrides(model, name):
            raise InvalidSettingsError(
                f"validation is set, but {type(model).__name__} has no validation_step; write one, or leave it out"
            )
        metrics = _metrics_in(model)
        for metric in metrics:  # so that their states are those of these rows
            metric.reset()
        values = _Log(not model.training, batch.rows, metrics)
        with self._attached(model, values):
            returned = _call_step(getattr(model, name), _rows_of(batch), self._index)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if loss is None and not model.training:
            return ForwardResult((), batch.labels, [torch.zeros(())], [0.0], values.logged)
        if loss is None or (isinstance(loss, torch.Tensor) and loss.numel() != 1):
            raise DataError(f"{name} must return a loss of one value, or a dict with 'loss', not {returned!r:.200}")
        total, count = summed(name, loss, batch.rows)
        return ForwardResult((), batch.labels, [total], [count], values.logged)

    @contextmanager
    def _attached(self, module: Any, values: _Log) -> Iterator[None]:
        """Give the module `self.log`, `self.log_dict` and `self.trainer` for one call."""
        modules = [each for each in module.modules() if "_trainer" in each.__dict__ and lightning_class(each)]
        module.__dict__.update(log=values.log, log_dict=values.log_dict)
        for each in modules:
            each.__dict__["_trainer"] = self._trainer
        try:
            yield
        finally:
            for name in ("log", "log_dict"):
                module.__dict__.pop(name, None)
            for each in modules:
                each.__dict__["_trainer"] = None


class _Log:
    """`self.log` and `self.log_dict` of one call of a step, which collect values with the rows they are means of."""

    def __init__(self, validation: bool, rows: int, metrics: Sequence[Any]) -> None:
        self.logged: dict[LoggedName, LoggedValue] = {}
        self._validation, self._rows, self._metrics = validation, rows, metrics

    def log(
        self, name: str, value: Any, *more: Any, reduce_fx: Any = "mean", batch_size: int | None = None, **others: Any
    ) -> None:
        """Record a value; the arguments are those of Lightning, of which name, value and batch_size matter."""
        reduce_fx = more[4] if len(more) > 4 else reduce_fx
        if not self._rows:
            log.warning("self.log(%r) has no effect outside of training_step and validation_step", name)
            return
        if reduce_fx not in ("mean", torch.mean):
            raise InvalidSettingsError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}) is not possible: the value of an epoch is the mean over "
                "its rows. Leave reduce_fx out, or log a torchmetrics metric such as MaxMetric or SumMetric"
            )
        key, rows = LoggedName(name, self._validation), float(self._rows if batch_size is None else batch_size)
        if hasattr(value, "_reductions") and hasattr(value, "update"):
            if not any(value is each for each in self._metrics):
                raise InvalidSettingsError(
                    f"self.log({name!r}, ...) was given a {type(value).__name__} that is not an attribute of the "
                    "module; assign it in __init__"
                )
            self.logged[key] = LoggedValue(value, float(self._rows))
            return
        if isinstance(value, Mapping):
            raise InvalidSettingsError(f"self.log({name!r}, ...) was given a dict; use self.log_dict")
        try:
            number = number_of(value.detach()) if isinstance(value, torch.Tensor) else float(value)
        except (TypeError, ValueError, RuntimeError):
            shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise InvalidSettingsError(
                f"self.log({name!r}, ...) needs one number or a torchmetrics metric, not {type(value).__name__}{shape}"
            ) from None
        total, before = self.logged.get(key, (0.0, 0.0))  # a name that is logged twice has the mean of both
        self.logged[key] = LoggedValue(total + number * rows, before + rows)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)


def _metrics_in(module: torch.nn.Module) -> list[Any]:
    """Return the torchmetrics metrics of a module, each before the collection that it is in."""
    collection = ("items", "update", "compute", "reset")
    return [
        each
        for each in module.modules()
        if hasattr(each, "_reductions") or all(hasattr(each, name) for name in collection)
    ][::-1]


def _rows_of(batch: TorchBatch) -> Any:
    inputs, labels = (values[0] if len(values) == 1 else values for values in (batch.inputs, batch.labels))
    if not batch.labels:
        return inputs
    return (inputs, labels) if batch.weights is None else (inputs, labels, batch.weights)


def _call_step(step: Callable[..., Any], batch: Any, index: int) -> Any:
    """Call a step with as many of (batch, batch_idx) as it takes."""
    parameters = inspect.signature(step).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters) or len(parameters) >= 2:
        return step(batch, index)
    return step(batch)


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


def prediction_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return how `transform` calls a module: `predict_step` of a LightningModule that has one, else the module."""
    if lightning_class(module) is None or not overrides(module, "predict_step"):
        return module
    predict: Any = module.predict_step

    def call(*inputs: torch.Tensor) -> Any:
        return _call_step(predict, inputs[0] if len(inputs) == 1 else inputs, 0)

    return call

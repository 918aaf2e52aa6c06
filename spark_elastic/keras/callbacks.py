"""Callbacks for data-parallel `model.fit`, with Horovod's names and arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from numbers import Real
from typing import Any

import keras

from spark_elastic.collective.objects import allgather_object
from spark_elastic.collective.operations import is_provisional
from spark_elastic.collective.process import rank, size
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.replicas import VariableComparison
from spark_elastic.elastic.handlers import take_over
from spark_elastic.errors import UsageError
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.callback_state import resume_point


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts the model and the optimizer of one member to all, once, when training begins.

    Args:
        root_rank: rank of that member.
        device: has no effect; for compatibility with Horovod.
        process_set: the processes to broadcast to.
        local_variables: variables of the model that are not broadcast.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        process_set: ProcessSet = global_process_set,
        local_variables: Any = None,
    ) -> None:
        super().__init__()
        several = isinstance(local_variables, (list, tuple, set))
        local = local_variables if several else [local_variables]
        self._local = {id(variable) for variable in local if variable is not None}
        self.root_rank = root_rank
        self._process_set = process_set
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        VariableComparison.broadcast_follows = not self.model.built
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()  # a model may be built by its first batch

    def _broadcast(self) -> None:
        from spark_elastic.keras.elastic.handlers import ModelHandler, OptimizerHandler, VariablesHandler

        if self.broadcast_done:
            return
        self.broadcast_done = True
        if is_provisional():  # a new worker receives the state from the elastic loop
            return
        model = self.model
        shared = [variable for variable in model.variables if id(variable) not in self._local]
        local = VariablesHandler(shared, "the list of variables", list) if self._local else None
        handlers: dict[str, Any] = {"model": local or ModelHandler(model)}
        if getattr(model, "optimizer", None) is not None:
            handlers["optimizer"] = OptimizerHandler(model.optimizer, lambda: {"model": model})
        take_over(handlers, self.root_rank, process_set=self._process_set)
        VariableComparison.broadcast_follows = False


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics of an epoch by their averages over the members, for the callbacks after this one.

    A metric that only some members have, such as one of a validation on rank 0, is averaged over those members.

    Args:
        device: has no effect; for compatibility with Horovod.
        process_set: the processes to average over.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        own = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
        gathered = allgather_object(own, process_set=self._process_set)
        if logs is not None:
            for name in own:
                found = [metrics[name] for metrics in gathered if name in metrics]
                logs[name] = sum(found) / len(found)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to `initial_lr * multiplier(epoch)` while epochs are in [start_epoch, end_epoch).

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: a number, or a function of the epoch, which has a fraction unless `staircase`.
        start_epoch: the first epoch in which the rate is set.
        end_epoch: the epoch after the last one; None: no end.
        staircase: change the rate only at the beginning of an epoch.
        momentum_correction: scale the momentum with the rate during the step after a change of the rate. Keras fixes
            the momentum when it compiles a step, so this has an effect only with `run_eagerly=True` or on PyTorch.
        steps_per_epoch: default: the number that `fit` determines.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UsageError("initial_lr must be a number, the learning rate to multiply; got None")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.staircase = staircase if callable(multiplier) else True
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda _: float(multiplier)
        self._epoch = 0
        self._steps = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._steps = self.steps_per_epoch or (self.params or {}).get("steps") or 0
        if not self.staircase and not self._steps:
            raise UsageError(
                f"{type(self).__name__} changes the learning rate within epochs, and fit does not know the number of "
                "steps of an epoch; set steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        resumed = resume_point(self.model)
        epoch = self._epoch + resumed.epochs
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(epoch + (resumed.batches + batch) / self._steps)
        elif batch == 0:
            self._set(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self._optimizer().momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _set(self, epoch: float) -> None:
        old, new = self._rate(), float(self.initial_lr * self.multiplier(epoch))
        self.model.optimizer.learning_rate = new
        optimizer = self._optimizer()
        momentum = getattr(optimizer, "momentum", None)
        is_variable = BACKEND == "torch" or bool(self.model.run_eagerly)
        if self.momentum_correction and momentum and old and old != new and is_variable:
            self._momentum = momentum
            optimizer.momentum = momentum * new / old

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _optimizer(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increases the learning rate over the first epochs from `initial_lr / size` to `initial_lr` (Goyal et al. 2017).

    The size is looked up at every step, so the ramp follows a world that changes.

    Args:
        initial_lr: the learning rate after the warm-up, already scaled with the number of members.
        warmup_epochs: length of the warm-up; it may be a fraction.
        momentum_correction: as for `LearningRateScheduleCallback`.
        steps_per_epoch: as for `LearningRateScheduleCallback`.
        verbose: 1: print a line at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # counted one step ahead, so that the last step of the warm-up has the full rate
            done = min(1.0, (epoch + 1.0 / self._steps) / warmup_epochs) if warmup_epochs else 1.0
            return (1.0 + done * (size() - 1)) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=math.ceil(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        number = epoch + resume_point(self.model).epochs + 1
        if self.verbose and number == self.end_epoch and rank() == 0:
            print(f"epoch {number}: the learning rate has reached {self._rate():g}")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A ModelCheckpoint of the best model, with its arguments; rank 0 writes it, and all keep track of the best."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best_model.keras",
    ) -> None:
        super().__init__(
            filepath=filepath, monitor=monitor, verbose=verbose, save_best_only=True, mode=mode, save_freq=save_freq
        )

    def set_model(self, model: Any) -> None:
        super().set_model(_WrittenByRank0(model))


class _WrittenByRank0:
    """A proxy of a model whose `save` has an effect only on rank 0."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        if rank() == 0:
            self._model.save(*args, **kwargs)

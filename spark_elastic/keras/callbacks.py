"""Callbacks for data-parallel `model.fit`, with Horovod's names and arguments."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from numbers import Real
from typing import Any

import keras

from spark_elastic.collective.objects import allgather_object
from spark_elastic.collective.operations import outside_world
from spark_elastic.collective.process import rank, size
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.elastic.handlers import take_over
from spark_elastic.errors import UsageError
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.elastic.fit_session import FitResumePoint


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Has all members start from the model and the optimizer of one: after a random start, or a loaded checkpoint.

    Args:
        root_rank: of the member whose variables everybody takes over, once, when training begins.
        device: accepted for Horovod's sake.
        local_variables: variables of the model that each member keeps its own of.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        process_set: ProcessSet = global_process_set,
        local_variables: Any = None,
    ) -> None:
        super().__init__()
        self._local: set[int] = set()
        several = isinstance(local_variables, (list, tuple, set))
        for variable in local_variables if several else [local_variables]:
            if variable is not None:
                self.register_local_var(variable)
        self.root_rank = root_rank
        self._process_set = process_set
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Have each member keep its own of this variable."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        if self.model.built:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()  # a model that is built with its first batch

    def _broadcast(self) -> None:
        from spark_elastic.keras.elastic.handlers import ListHandler, ModelHandler, OptimizerHandler

        if self.broadcast_done:
            return
        self.broadcast_done = True
        if outside_world():  # the elastic loop brings a newcomer the state
            return
        model = self.model
        shared = [variable for variable in model.variables if id(variable) not in self._local]
        handlers: dict[str, Any] = {"model": ListHandler(shared) if self._local else ModelHandler(model)}
        if getattr(model, "optimizer", None) is not None:
            handlers["optimizer"] = OptimizerHandler(model.optimizer, lambda: {"model": model})
        take_over(handlers, self.root_rank, process_set=self._process_set)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Has the metrics of an epoch be their averages over the members, for the callbacks that come after this one.

    A metric that only some members have, such as those of a validation on rank 0, is averaged over these.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        own = {name: float(value) for name, value in (logs or {}).items() if isinstance(value, Real)}
        everyone = allgather_object(own, process_set=self._process_set)
        if logs is not None:
            for name in own:
                found = [metrics[name] for metrics in everyone if name in metrics]
                logs[name] = sum(found) / len(found)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to `initial_lr * multiplier(epoch)` while epochs are in [start_epoch, end_epoch).

    Args:
        initial_lr: what is multiplied.
        multiplier: a number, or a function of the epoch, which is a fraction if not `staircase`.
        staircase: change the rate at the beginning of an epoch only.
        momentum_correction: scale the momentum with the rate for the one step in which the rate has changed. Keras
            fixes momentum when it compiles a step, so this has an effect only with `run_eagerly=True` or on PyTorch.
        steps_per_epoch: default: what `fit` knows.
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
            raise UsageError("initial_lr is needed: the learning rate that the multiplier is applied to")
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
                f"{type(self).__name__} changes the learning rate within epochs and fit does not know how long they "
                "are; give steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        earlier = FitResumePoint.of(self.model)
        epoch = self._epoch + earlier.epochs
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(epoch + (earlier.batches + batch) / self._steps)
        elif batch == 0:
            self._set(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self._optimizer().momentum, self._momentum = self._momentum, None

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _set(self, epoch: float) -> None:
        present, after = self._rate(), float(self.initial_lr * self.multiplier(epoch))
        self.model.optimizer.learning_rate = after
        optimizer = self._optimizer()
        momentum = getattr(optimizer, "momentum", None)
        at_run_time = BACKEND == "torch" or bool(self.model.run_eagerly)
        if self.momentum_correction and momentum and present and present != after and at_run_time:
            self._momentum = momentum
            optimizer.momentum = momentum * after / present

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _optimizer(self) -> Any:
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate over the first epochs from `initial_lr / size` to `initial_lr`.

    Give `initial_lr` as it is to be afterwards, scaled with the number of members (Goyal et al. 2017). The size is
    looked up at every step, so the ramp follows a world that changes.
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
            # one step ahead, so that the last step of the warm-up has the full rate
            done = min(1.0, (epoch + 1.0 / self._steps) / warmup_epochs) if warmup_epochs else 1.0
            return (1.0 + done * (size() - 1)) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=_whole(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: MutableMapping[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        number = epoch + FitResumePoint.of(self.model).epochs + 1
        if self.verbose and number == self.end_epoch:
            print(f"epoch {number}: the learning rate has reached {self._rate():g}")


def _whole(epochs: float) -> int:
    return int(-(-epochs // 1))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """ModelCheckpoint of the best model, which rank 0 alone writes; all members remember which was the best.

    Args:
        filepath: where the model goes; Horovod's is set by its estimators.
        monitor, verbose, mode, save_freq: as in Keras.
    """

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
    """A model whose `save` does something on rank 0 only."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        if rank() == 0:
            self._model.save(*args, **kwargs)

"""KerasState: models, optimizers and plain values that outlive a change of the world."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from spark_elastic.collective.handled_state import HandledState
from spark_elastic.collective.handled_values import StateHandler
from spark_elastic.core.recovery import Recovery
from spark_elastic.errors import HorovodInternalError
from spark_elastic.keras import variables as values
from spark_elastic.keras.elastic.boundary import Boundary, marked_steps
from spark_elastic.keras.elastic.handlers import ModelHandler, OptimizerHandler, handler_for

log = logging.getLogger("spark_elastic.keras")


class KerasState(HandledState):
    """A model, its optimizer and plain values, each a keyword argument and then an attribute.

    Steps are counted by the optimizers themselves, so also those inside of one call of `steps_per_execution` batches.
    A step whose reduction failed has changed nothing once the loop goes on: the running means, seeds and metrics that
    it had touched are put back.

    Args:
        model: a Keras model, built or not, compiled or not.
        optimizer: default: the one that the model is compiled with.
        kwargs: more models, optimizers, metrics and variables, and anything else to keep, such as batch=0 and epoch=0.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self._counts: dict[str, int] = {}
        self._boundary: Boundary | None = None
        self._unmark: list[Callable[[], None]] = []
        self._running: tuple[Any, list[Any], list[Any]] | None = None
        self._unbuilt = False
        self._written: tuple[int, int] = (0, 0)
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        for name in self._handlers:
            self._replaced(name)
        self._adopt_optimizer()
        self.save()

    def _handler_for(self, value: Any) -> StateHandler | None:
        return handler_for(value, self._models)

    def _model_handlers(self) -> list[ModelHandler]:
        return [handler for handler in self._handlers.values() if isinstance(handler, ModelHandler)]

    def _models(self) -> dict[str, Any]:
        return {name: handler.value for name, handler in self._handlers.items() if isinstance(handler, ModelHandler)}

    def _optimizers(self) -> dict[str, Any]:
        return {name: h.value for name, h in self._handlers.items() if isinstance(h, OptimizerHandler)}

    def _replaced(self, name: str) -> None:
        if isinstance(self._handlers[name], OptimizerHandler):
            self._steps.setdefault(name, 0)
            self._counts[name] = steps_of(self._handlers[name].value)

    def _adopt_optimizer(self) -> None:
        """Keep the optimizer that the model is really trained with: it may have been compiled meanwhile.

        Under mixed_float16 `compile` puts a `LossScaleOptimizer` around the one that it is given.
        """
        compiled = getattr(self.__dict__.get("model"), "optimizer", None)
        own = self.__dict__.get("optimizer")
        if compiled is None or compiled is own:
            return
        if own is None:
            handler = self._handler_for(compiled)
            if handler is None:
                return
            self._names.remove("optimizer")
            self._saved_values.pop("optimizer", None)
            self._handlers["optimizer"] = handler
            object.__setattr__(self, "optimizer", compiled)
            handler.save()
            self._replaced("optimizer")
        elif getattr(compiled, "inner_optimizer", None) is own:
            self.optimizer = compiled
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        """Give the optimizer its slots if that is possible, so that a commit before the first step has them."""
        model, optimizer = getattr(self, "model", None), getattr(self, "optimizer", None)
        belongs = optimizer is getattr(model, "optimizer", None)
        if model is None or optimizer is None or not belongs:
            return
        if model.built and not optimizer.built and model.trainable_variables:
            optimizer.build(model.trainable_variables)

    # --- steps ----------------------------------------------------------------------------------

    @property
    def progress(self) -> int | None:
        """Optimizer steps in this state; None before it was first synchronised."""
        self._count_steps()
        return self._progress

    def _count_steps(self) -> None:
        """Take in what the optimizers have counted since the last time."""
        if self._progress is None:
            return
        taken = 0
        for name, optimizer in self._optimizers().items():
            now = steps_of(optimizer)
            since, self._counts[name] = now - self._counts[name], now
            self._steps[name] += max(since, 0)
            taken += max(since, 0)
        if taken:
            self._set_progress(self._progress + taken)

    def _forget_counts(self) -> None:
        """The optimizers have been given other values."""
        for name, optimizer in self._optimizers().items():
            self._counts[name] = steps_of(optimizer)
        if self._boundary is not None:
            self._boundary.forget()

    # --- what users call ------------------------------------------------------------------------

    def save(self) -> None:
        self._build_optimizer()
        self._count_steps()
        super().save()

    def commit(self) -> None:
        """Make the present state the one that `restore` returns to, then check for updated hosts.

        Raises: HostsUpdatedInterrupt: the world is about to change; on every member at the same commit.
        """
        self.save()
        self._committed()
        self._mark_resume_point()
        self._check_host_updates()

    def restore(self) -> None:
        self._count_steps()
        super().restore()
        self._forget_counts()

    def sync(self) -> None:
        self._adopt_optimizer()
        super().sync()
        self._forget_counts()

    # --- what the loop calls --------------------------------------------------------------------

    def _sync_from(self, root: int, progress: int | None) -> None:
        super()._sync_from(root, progress)
        # a root whose model has no variables yet could send none; all members build theirs at the same point then
        self._unbuilt = any(
            not handler.built() for handler in self._handlers.values() if isinstance(handler, ModelHandler)
        )

    def _recover(self, error: HorovodInternalError) -> None:
        self._count_steps()
        super()._recover(error)
        self._keep_running_metrics()

    def _interrupted(self) -> None:
        self._keep_running_metrics()

    def _mark_resume_point(self) -> None:
        self._count_steps()
        super()._mark_resume_point()
        if self._in_loop and not self._unmark:
            self._mark_steps()

    def _settle(self, choice: Recovery) -> None:
        if choice is not Recovery.COMMIT and self._boundary is not None and self._boundary.put_back():
            log.info("put back what the unfinished step had changed")

    def _left_loop(self) -> None:
        super()._left_loop()
        for undo in self._unmark:
            undo()
        self._unmark = []

    # --- the start of each step -----------------------------------------------------------------

    def _mark_steps(self) -> None:
        if self._boundary is None:
            self._boundary = Boundary(self._step_variables, self._applied)
        for model in self._models().values():
            if hasattr(model, "train_step"):
                self._unmark.append(marked_steps(model, self._boundary.prepare, self._step_starts))

    def _step_starts(self, data: Any) -> None:
        assert self._boundary is not None
        self._boundary.mark()

    def _step_variables(self) -> list[Any]:
        found = {id(v): v for handler in self._model_handlers() for v in handler.step_variables()}
        return list(found.values())

    def _applied(self) -> Any:
        """Steps of all optimizers together, as a tensor in a graph."""
        counts = [count_of(optimizer) for optimizer in self._optimizers().values()]
        return sum(counts[1:], start=counts[0]) if counts else 0

    # --- metrics of an epoch that goes on in another call of fit ----------------------------------

    def _keep_running_metrics(self) -> None:
        counting = self._metrics_variables()
        self._running = self._place(), counting, values.copies_of(counting)

    def put_running_metrics_back(self) -> None:
        """Have the metrics of the model go on where they were when the loop was left.

        Keras sets them to zero when `fit` is entered. Called at the beginning of the epoch, it makes the epoch's
        metrics those of all its batches; if the epoch is not the one that was left, it does nothing.
        """
        running, self._running = self._running, None
        if running is None or running[0] != self._place():
            return
        _, counting, copies = running
        if [id(variable) for variable in counting] == [id(variable) for variable in self._metrics_variables()]:
            values.put_back(counting, copies)

    def _metrics_variables(self) -> list[Any]:
        return list(getattr(self.__dict__.get("model"), "metrics_variables", ()))

    def _place(self) -> tuple[Any, Any]:
        return self.__dict__.get("epoch"), self.__dict__.get("batch")


def count_of(optimizer: Any) -> Any:
    """Steps applied by an optimizer: a number, or a tensor that is one when it is evaluated."""
    counted = getattr(optimizer, "steps_applied", None)  # a DistributedOptimizer also counts steps that were skipped
    if counted is not None:
        return counted()
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._iterations.value


def steps_of(optimizer: Any) -> int:
    """Steps applied by an optimizer."""
    return int(count_of(optimizer))

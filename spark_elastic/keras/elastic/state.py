"""KerasState: models, optimizers and plain values that outlive a change of the world."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from spark_elastic.collective.replicas import by_unique_name
from spark_elastic.elastic.handlers import Handlers
from spark_elastic.elastic.mark import OptimizerSteps, StepCounter
from spark_elastic.elastic.state import ElasticState
from spark_elastic.errors import HorovodInternalError
from spark_elastic.keras import backend
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.elastic.fit_session import FitCallbacks, FitSession
from spark_elastic.keras.elastic.handlers import ModelHandler, OptimizerHandler, VariablesHandler, handler_for
from spark_elastic.keras.elastic.step_snapshot import SnapshottedSteps
from spark_elastic.keras.optimizer import distributed, reduces

log = logging.getLogger("spark_elastic.keras")


class KerasState(ElasticState):
    """A model, its optimizer and plain values, each a keyword argument and then an attribute.

    Steps are counted by the optimizers. A mark copies the variables that nothing trains: running means, seeds, metrics.
    In `model.fit` with this package's callbacks each step is a mark, also within an execution of several
    (`steps_per_execution`). Training returns to the last commit if an optimizer has stepped since the mark, or if the
    state has trainable variables that none of its optimizers trains, such as those of a target network.

    Args:
        model: A Keras model, built or not, compiled or not.
        optimizer: Default: the one that the model is compiled with.
        kwargs: More models, optimizers, metrics and variables, and anything else to keep, such as batch=0 and epoch=0.
    """

    _steps: KerasSteps
    model: Any
    optimizer: Any
    batch: Any
    epoch: Any
    fit_callbacks: FitCallbacks
    """The values of the callbacks of `fit`."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        def models() -> dict[str, Any]:
            return {name: handler.value for name, handler in self._handlers.of_type(ModelHandler).items()}

        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        own = {"model": model, "optimizer": optimizer, "fit_callbacks": FitCallbacks()}
        super().__init__(partial(handler_for, models=models), KerasSteps, {**own, **kwargs})

    # --- called by the loop ---------------------------------------------------------------------

    def _before_joining(self) -> None:
        """Trace the train step and run it once, as a graph's first run is slow; then put all values back."""
        model: Any = self.__dict__.get("model")
        in_advance = self._steps.fit.batches_in_advance
        if BACKEND != "tensorflow" or in_advance is None:
            return
        if getattr(model, "optimizer", None) is None or model.run_eagerly:
            return
        self.save()
        self._steps.snapshots.wrap()
        try:
            model.make_train_function()
            if model.built and model.optimizer.built:
                with self._frontend.alone():
                    model.train_function(in_advance(1))
            else:  # the root's variables may not exist yet, and those that a step makes here would keep its changes
                import tensorflow as tf

                with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                    model.train_function(in_advance(0))  # traces it
        except Exception as error:  # if it comes again, `fit` raises it where its caller expects that
            log.info("the train step could not be run before joining: %s", error)
            model.train_function = None
        finally:
            self._steps.drop_passes()
            self.restore()

    def _function_begins(self) -> None:
        self._steps.drop_passes()  # those before the loop, which members have made unequally often
        self._steps.marked = False
        super()._function_begins()

    def _recover(self, error: HorovodInternalError) -> None:
        self.fit_callbacks.left()
        super()._recover(error)
        self._steps.fit.keep_running_metrics()

    def _interrupted(self) -> None:
        self.fit_callbacks.left()
        super()._interrupted()
        self._steps.fit.keep_running_metrics()

    def _loop_over(self) -> None:
        super()._loop_over()
        self.fit_callbacks.over()
        self._steps.fit.fit_ends()
        self._steps.snapshots.unwrap()


class KerasSteps(OptimizerSteps):
    """Reads the step counts of Keras' optimizers, and undoes what an unfinished step has done to models and metrics."""

    def __init__(self, handlers: Handlers, counter: StepCounter) -> None:
        super().__init__(handlers, counter)
        self._state: Any = handlers.owner
        self.fit = FitSession(self._state)
        self.snapshots = SnapshottedSteps(handlers, self.fit, self._built)
        self._polled: dict[str, int] = {}
        """The step count of each optimizer when it was last read."""
        self._copies: backend.Copies | None = None
        """The values at the mark of the variables that nothing trains; None in `fit`, whose steps copy them."""
        self._state.fit_callbacks.session = self.fit
        self._outside: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The step counts at the last mark of the optimizers that reduce gradients outside of the state."""
        self.marked = False
        """The state was marked since the function of the loop began."""

    def attach(self, name: str) -> None:
        handler = self._handlers.by_name[name]
        if isinstance(handler, OptimizerHandler):
            self._counter.steps.setdefault(name, 0)
            self._polled[name] = int(handler.steps_applied())

    def count(self, replaced: bool = False) -> None:
        self._adopt_optimizer()
        if replaced:
            self.snapshots.discard()
            self._copies = None
        elif self._counter.version is None or self._counter.alone:
            return
        taken = 0
        for name, handler in self._handlers.of_type(OptimizerHandler).items():
            now = int(handler.steps_applied())
            since = 0 if replaced else max(now - self._polled[name], 0)
            self._polled[name] = now
            self._counter.steps[name] += since
            taken += since
        if taken:
            self._counter.advance(taken)

    def _adopt_optimizer(self) -> None:
        """Replace the state's optimizer by the model's, which `compile` may have made, or wrapped, afterwards."""
        values = self._state.__dict__
        compiled = getattr(values.get("model"), "optimizer", None)
        own = values.get("optimizer")
        if compiled is not None and own is None:
            self._handlers.adopt("optimizer", compiled)
            if "optimizer" in self._handlers.by_name:
                self.attach("optimizer")
        elif compiled is not own and getattr(compiled, "inner_optimizer", None) is own:
            self._state.optimizer = compiled  # under mixed_float16, a LossScaleOptimizer around it
        # built for a built model, so that a commit before the first step has the slots
        model, optimizer = getattr(self._state, "model", None), getattr(self._state, "optimizer", None)
        belongs = optimizer is getattr(model, "optimizer", None)
        if model is None or optimizer is None or not belongs:
            return
        if model.built and not optimizer.built and model.trainable_variables:
            optimizer.build(model.trainable_variables)

    def check(self) -> None:
        for optimizer in self._outsiders():
            if int(optimizer.steps_applied()) != self._outside.get(optimizer, 0):
                self.refuse_outsider(optimizer)
        if self._state._root_unbuilt:
            self.count()
            if any(self._counter.steps.values()):
                self._state.sync_if_built_late()
        optimizers = [handler.value for handler in self._handlers.of_type(OptimizerHandler).values()]
        marked, self.marked = self.marked, True
        if optimizers and all(map(reduces, optimizers)):
            return
        self.count()
        self.compare_models(
            any(self._counter.steps.values()) if optimizers else marked,
            self._parameters,
            "Pass the optimizer through hvd.DistributedOptimizer, or the tape through hvd.DistributedGradientTape, and "
            "give the optimizer to the state",
        )

    def _outsiders(self) -> list[Any]:
        """Return the optimizers that reduce gradients and are not in the state."""
        kept = {id(steps) for steps in self.snapshots.reducing()}
        outside = [each for each in list(distributed) if reduces(each) and id(each._steps) not in kept]
        if not outside:
            return []
        listed = {id(backend.native(variable)) for variable in self._variables()}
        return [each for each in outside if not listed.issuperset(id(backend.native(v)) for v in each.variables)]

    def _variables(self) -> list[Any]:
        """Return the variables of all values but optimizers."""
        handlers = self._handlers.of_type(VariablesHandler).values()
        return [v for each in handlers if not isinstance(each, OptimizerHandler) for v in each.variables()]

    def _trained_by_optimizers(self) -> dict[int, Any]:
        optimizers = [handler.value for handler in self._handlers.of_type(OptimizerHandler).values()]
        return {id(backend.native(v)): v for each in optimizers for v in getattr(each, "_trainable_variables", ())}

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the values of the variables that models train, and of those that optimizers of the state train."""
        trained = {
            id(backend.native(variable)): variable
            for handler in self._handlers.of_type(ModelHandler).values()
            for variable in handler.trained()
        }
        trained |= self._trained_by_optimizers()
        return by_unique_name((backend.describe(each).path, backend.to_wire(each)) for each in trained.values())

    def passes_begun(self) -> int:
        return max((steps.passes for steps in self._accumulating() if not bool(steps.at_boundary())), default=0)

    def mark(self) -> None:
        if self._counter.in_loop and not self.snapshots.wrapped:
            self.snapshots.wrap()
        self._outside = WeakKeyDictionary({each: int(each.steps_applied()) for each in self._outsiders()})
        self._copies = None if self.fit.marks else backend.Copies(self.snapshots.untrained())

    def undo(self, plain: dict[str, Any]) -> str:
        self.count()
        self.drop_passes()
        changed = super().undo(plain)
        if self.fit.marks and self.snapshots.restore():
            changed = ""
            if self.fit.counts_batches and "batch" in plain:  # several steps of one execution may have been applied
                passes = max((steps.passes for steps in self.snapshots.reducing()), default=1)
                plain["batch"] += max(self._counter.steps.values()) * passes
        trained = self._trained_by_optimizers()
        unobserved = [v for v in self._variables() if v.trainable and id(backend.native(v)) not in trained]
        if not changed and unobserved:
            return f"no optimizer in the state trains {backend.describe(unobserved[0]).path}, which may have changed"
        if not changed and not self.fit.marks:
            if self._copies is None:
                return "model.fit has ended since the last mark"
            self._copies.restore()
        return changed

    def drop_passes(self) -> None:
        """Discard the gradients accumulated for unfinished steps."""
        for steps in self._accumulating():
            steps.drop()

    def _built(self) -> None:
        """Add the variables that were created since the last commit and mark to these, with their initial values."""
        for handler in self._handlers.of_type(VariablesHandler).values():
            handler.save_new()
        if self._copies is not None:
            self._copies.add(self.snapshots.untrained())

    def _accumulating(self) -> list[Any]:
        return [steps for steps in self.snapshots.reducing() if steps.passes > 1]

"""KerasState: models, optimizers and plain values that outlive a change of the world."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from spark_elastic.collective.replicas import by_unique_name
from spark_elastic.elastic.handlers import Handlers, StateHandler
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
        def choose_handler(value: Any) -> StateHandler | None:
            return handler_for(value, models)

        def models() -> dict[str, Any]:
            return {name: handler.value for name, handler in self._handlers.of_type(ModelHandler).items()}

        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        memory = FitCallbacks(lambda: self.__dict__.get("epoch"))
        own = {"model": model, "optimizer": optimizer, "fit_callbacks": memory}
        super().__init__(choose_handler, KerasSteps, {**own, **kwargs})

    # --- called by the loop ---------------------------------------------------------------------

    def _before_joining(self) -> None:
        self._steps.rehearse()

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
        self._copies: tuple[list[Any], list[Any]] | None = None
        """The variables that nothing trains, and their values at the mark; None in `fit`, whose steps copy them."""
        self._state.fit_callbacks.detached = self.fit.fit_ends
        self._state.fit_callbacks.set_progress = self.fit.set_progress
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
            self.snapshots.snapshot.discard()
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
        """Replace the state's optimizer by that of the model, which may have been compiled after the state was created.

        Under mixed_float16 `compile` puts a `LossScaleOptimizer` around the optimizer that it is given.
        """
        values = self._state.__dict__
        compiled = getattr(values.get("model"), "optimizer", None)
        own = values.get("optimizer")
        if compiled is not None and own is None:
            self._handlers.adopt("optimizer", compiled)
            if "optimizer" in self._handlers.by_name:
                self.attach("optimizer")
        elif compiled is not own and getattr(compiled, "inner_optimizer", None) is own:
            self._state.optimizer = compiled
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
        handlers = [h for h in self._handlers.of_type(VariablesHandler).values() if not isinstance(h, OptimizerHandler)]
        listed = {id(backend.native(variable)) for handler in handlers for variable in handler.variables()}
        return [each for each in outside if not listed.issuperset(id(backend.native(v)) for v in each.variables)]

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the values of the variables that models train, and of those that optimizers of the state train."""
        trained = {
            id(backend.native(variable)): variable
            for handler in self._handlers.of_type(ModelHandler).values()
            for variable in handler.trained()
        }
        for handler in self._handlers.of_type(OptimizerHandler).values():
            trained |= {id(backend.native(v)): v for v in getattr(handler.value, "_trainable_variables", ())}
        return by_unique_name((backend.describe(each).path, backend.to_wire(each)) for each in trained.values())

    def passes_begun(self) -> int:
        return max((steps.passes for steps in self._accumulating() if not bool(steps.at_boundary())), default=0)

    def mark(self) -> None:
        if self._counter.in_loop and not self.snapshots.wrapped:
            self.snapshots.wrap()
        self._outside = WeakKeyDictionary({each: int(each.steps_applied()) for each in self._outsiders()})
        if self.fit.marks:
            self._copies = None
        else:
            variables = self.snapshots.untrained()
            self._copies = variables, backend.copy_values(variables)

    def undo(self, plain: dict[str, Any]) -> str:
        self.count()
        self.drop_passes()
        changed = super().undo(plain)
        if self.fit.marks and self.snapshots.snapshot.restore():
            changed = ""
            if self.fit.counts_batches and "batch" in plain:  # several steps of one execution may have been applied
                passes = max((steps.passes for steps in self.snapshots.reducing()), default=1)
                plain["batch"] += max(self._counter.steps.values()) * passes
        if not changed and (unobserved := self._unobserved()):
            return f"no optimizer in the state trains {unobserved[0]}, which may have changed"
        if not changed and not self.fit.marks:
            if self._copies is None:
                return "model.fit has ended since the last mark"
            backend.restore_values(*self._copies)
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
            variables, copies = self._copies
            known = set(map(id, variables))
            new = [each for each in self.snapshots.untrained() if id(each) not in known and backend.has_value(each)]
            with backend.outside_of_graphs():
                self._copies = variables + new, copies + backend.copy_values(new)

    def _accumulating(self) -> list[Any]:
        return [steps for steps in self.snapshots.reducing() if steps.passes > 1]

    def _unobserved(self) -> list[str]:
        """Return the paths of trainable variables that no optimizer in the state trains."""
        optimizers = [handler.value for handler in self._handlers.of_type(OptimizerHandler).values()]
        trained = {id(backend.native(v)) for each in optimizers for v in getattr(each, "_trainable_variables", ())}
        others = [h for h in self._handlers.of_type(VariablesHandler).values() if not isinstance(h, OptimizerHandler)]
        variables = [v for handler in others for v in handler.variables() if v.trainable]
        return [backend.describe(v).path for v in variables if id(backend.native(v)) not in trained]

    # --- a newcomer -----------------------------------------------------------------------------

    def rehearse(self) -> None:
        """Trace the train step and run it once, on rows of the training data; the values are as before afterwards.

        A graph's first run creates kernels and threads, which takes longer than the steps that follow.
        """
        model = self._state.__dict__.get("model")
        session = self.fit
        if BACKEND != "tensorflow" or session.batches_in_advance is None:
            return
        if getattr(model, "optimizer", None) is None or model.run_eagerly:
            return
        self.snapshots.wrap()
        try:
            model.make_train_function()
            if model.built and model.optimizer.built:
                with self._state._frontend.alone(), self._values_kept(model):
                    model.train_function(session.batches_in_advance(1))
            else:  # the root's variables may not exist yet, and those that a step makes here would keep its changes
                import tensorflow as tf

                with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                    model.train_function(session.batches_in_advance(0))  # traces it
        except Exception as error:  # if it comes again, `fit` raises it where its caller expects that
            log.info("the train step could not be run before joining: %s", error)
            model.train_function = None

    @contextmanager
    def _values_kept(self, model: Any) -> Iterator[None]:
        """Put the variables of the state back, which a step in this context changes, and the model's metrics."""
        handlers = self._handlers.of_type(VariablesHandler).values()
        found = [each for handler in handlers for each in handler.variables()]
        # a model that was compiled after the state was made has an optimizer that the state does not know yet
        found += [*model.variables, *model.optimizer.variables]
        variables = list({id(each): each for each in found}.values())
        copies = backend.copy_values(variables)
        reducing = self.snapshots.reducing()
        if reduces(model.optimizer) and model.optimizer._steps not in reducing:
            reducing.append(model.optimizer._steps)
        applied = [(steps, int(steps.applied())) for steps in reducing]
        try:
            yield
        finally:
            backend.restore_values(variables, copies)
            for steps, count in applied:
                steps.drop()
                steps.set_applied(count)
            for metric in model.metrics:  # the first step may have made some of their variables
                metric.reset_state()
            self.snapshots.snapshot.discard()

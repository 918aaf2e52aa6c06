"""KerasState: models, optimizers and plain values that outlive a change of the world."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spark_elastic.collective import fused
from spark_elastic.elastic.handlers import Handlers, StateHandler
from spark_elastic.elastic.plain_values import CountingProbe
from spark_elastic.elastic.state import ElasticState
from spark_elastic.elastic.steps import LoopWatch, OptimizerSteps, Recovery, StepCounter
from spark_elastic.errors import HorovodInternalError
from spark_elastic.keras import backend
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.elastic.fit_session import FitCallbacks, FitSession
from spark_elastic.keras.elastic.handlers import ModelHandler, OptimizerHandler, VariablesHandler, handler_for
from spark_elastic.keras.elastic.step_snapshot import SnapshottedSteps, save_new
from spark_elastic.keras.optimizer import reduces

log = logging.getLogger("spark_elastic.keras")


class KerasState(ElasticState):
    """A model, its optimizer and plain values, each a keyword argument and then an attribute.

    Steps are counted by the optimizers, so that each step of an execution with several (`steps_per_execution`) counts.
    If the reduction of a step fails, the running means, seeds and metrics of the model return to their values before
    that step. A metric outside of the model, in a loop of your own, keeps what that step has added to it.

    Args:
        model: A Keras model, built or not, compiled or not.
        optimizer: Default: the one that the model is compiled with.
        kwargs: More models, optimizers, metrics and variables, and anything else to keep, such as batch=0 and epoch=0.
    """

    model: Any
    optimizer: Any
    batch: Any
    epoch: Any
    fit_callbacks: FitCallbacks
    """The values of the callbacks of `fit`."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(*keras_parts(self, model, optimizer, kwargs))


def keras_parts(
    state: ElasticState,
    model: Any,
    optimizer: Any,
    values: Mapping[str, Any],
    more_handlers: Callable[[Any], StateHandler | None] = lambda value: None,
) -> tuple[Callable[[Any], StateHandler | None], type[LoopWatch], type[OptimizerSteps], dict[str, Any]]:
    """Return the arguments of `ElasticState` for a state of Keras' objects.

    Args:
        state: The state that is being created.
        model: A model, or None.
        optimizer: An optimizer; None: the model's.
        values: More values by name.
        more_handlers: A function that returns the handler of a value, or None to choose it by the value's type.
    """

    def choose_handler(value: Any) -> StateHandler | None:
        return more_handlers(value) or handler_for(value, models)

    def models() -> dict[str, Any]:
        return {name: handler.value for name, handler in state._handlers.of(ModelHandler).items()}

    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    memory = FitCallbacks(lambda: state.__dict__.get("epoch"))
    own = {"model": model, "optimizer": optimizer, "fit_callbacks": memory}
    return choose_handler, KerasLoopWatch, KerasSteps, {**own, **values}


class KerasLoopWatch(LoopWatch):
    """Observes a user's own loop through its gradient reductions, except during a `fit` with this package's callbacks.

    Inside of a `tf.function` no Python runs when an optimizer steps, but each reduction of gradients calls Python. The
    step counts of the optimizers tell whether steps were applied since the reduction before.
    """

    def __init__(self, handlers: Handlers, counter: StepCounter) -> None:
        super().__init__(handlers, counter)
        self.watching = False
        self._probe = CountingProbe()
        self._entered: tuple[int, ...] | None = None
        """Steps applied when the last step was entered; None before the first since the loop was called."""
        self._at_first: tuple[int, ...] = ()
        """Steps applied when the first step was entered."""

    def begin(self) -> None:
        self.end()
        self.watching = True
        self._entered = None
        self._probe.begin()
        self.log.begin(self._values())
        fused.on_reduction.append(self._reduction_begins)

    def end(self) -> None:
        super().end()
        if self.watching:
            self.watching = False
            fused.on_reduction.remove(self._reduction_begins)

    def amid(self, error: HorovodInternalError) -> bool:
        return self.watching and self._probe.several_steps

    def _reduction_begins(self) -> None:
        save_new(self._handlers)
        steps = tuple(int(handler.steps_applied()) for handler in self._handlers.of(OptimizerHandler).values())
        if steps == self._entered:
            return  # another reduction of the same step, such as that of a second tape
        if self._entered is not None:
            self.log.stepped_meanwhile()
        self._entered = steps
        values = self._values()
        self.log.entering(values.__getitem__)
        self._probe_counting(steps, values)

    def _probe_counting(self, steps: tuple[int, ...], values: dict[str, Any]) -> None:
        """Compare the values at the steps of the first round, which ends when all optimizers in use have stepped.

        An optimizer that has not stepped when another one steps twice is not in use.
        """
        if not self._probe.started:
            self._at_first = steps
            self._probe.start(values)
        elif not self._probe.settled:
            since = [now - then for now, then in zip(steps, self._at_first, strict=True)]
            others_idle = max(since) > 1
            if not others_idle:
                self._probe.compare(values)
            if others_idle or len(set(since)) == 1:
                self._probe.settle()

    def _values(self) -> dict[str, Any]:
        """Return copies of the plain values; a model or optimizer that is None is not one of them."""
        found = self._handlers.plain.copies()
        return {name: value for name, value in found.items() if value is not None or name not in ("model", "optimizer")}


class KerasSteps(OptimizerSteps):
    """Reads the step counts of Keras' optimizers, and undoes what an unfinished step has done to models and metrics."""

    def __init__(self, handlers: Handlers, counter: StepCounter, watch: KerasLoopWatch) -> None:
        super().__init__(handlers, counter, watch)
        self.fit = FitSession(handlers.owner, self._totals_at_boundary)
        self.snapshots = SnapshottedSteps(handlers, self.fit)
        self._state: Any = handlers.owner
        self._own_loop = watch
        self._polled: dict[str, int] = {}
        """The step count of each optimizer when it was last read."""
        self._totals: dict[str, int] = {}
        """Steps of each optimizer since the state was made."""
        self._put_off = 0
        """The number of checks in a row that came between the passes of a step."""
        memory: FitCallbacks = self._state.fit_callbacks
        memory.attached = watch.end
        memory.detached = self._fit_ends

    # --- the values -----------------------------------------------------------------------------

    def attach(self, name: str) -> None:
        handler = self._handlers.by_name[name]
        if isinstance(handler, OptimizerHandler):
            self._counter.steps.setdefault(name, 0)
            self._polled[name] = int(handler.steps_applied())

    def before_save(self) -> None:
        self._build_optimizer()
        self.poll()

    def before_sync(self) -> None:
        """Replace the state's optimizer by that of the model, which may have been compiled after the state was created.

        Under mixed_float16 `compile` puts a `LossScaleOptimizer` around the optimizer that it is given.
        """
        values = self._state.__dict__
        compiled = getattr(values.get("model"), "optimizer", None)
        own = values.get("optimizer")
        if compiled is None or compiled is own:
            return
        if own is None:
            self._handlers.adopt("optimizer", compiled)
            if "optimizer" not in self._handlers.by_name:
                return
            self.attach("optimizer")
        elif getattr(compiled, "inner_optimizer", None) is own:
            self._state.optimizer = compiled
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        """Build the optimizer for a built model, so that a commit before the first step has the slots."""
        model, optimizer = getattr(self._state, "model", None), getattr(self._state, "optimizer", None)
        belongs = optimizer is getattr(model, "optimizer", None)
        if model is None or optimizer is None or not belongs:
            return
        if model.built and not optimizer.built and model.trainable_variables:
            optimizer.build(model.trainable_variables)

    def values_replaced(self) -> None:
        for name, handler in self._handlers.of(OptimizerHandler).items():
            self._polled[name] = int(handler.steps_applied())
        self.snapshots.discard()

    # --- steps ----------------------------------------------------------------------------------

    def poll(self) -> None:
        if self._counter.version is None or self._counter.alone:
            return
        taken = 0
        for name, handler in self._handlers.of(OptimizerHandler).items():
            now = int(handler.steps_applied())
            since = max(now - self._polled[name], 0)
            self._polled[name] = now
            self._counter.steps[name] += since
            self._totals[name] = self._totals.get(name, 0) + since
            taken += since
        if taken:
            self._counter.advance(taken)

    def may_mark(self) -> bool:
        """Return True if no optimizer holds gradients of some but not all passes of a step."""
        return all(bool(steps.at_boundary()) for steps in self._accumulating())

    def may_leave(self) -> bool:
        """Return False between the passes of a step, whose gradients would be lost, unless every check comes there."""
        if self.may_mark():
            self._put_off = 0
            return True
        self._put_off += 1
        return self._put_off > 2 * max(steps.passes for steps in self._accumulating())

    def since_resume_point(self) -> list[int]:
        """Return the steps of each optimizer, without unused ones.

        `compile` adds a plain optimizer, which never steps, to a model whose train step has optimizers of its own.
        """
        handlers = self._handlers.of(OptimizerHandler)
        distributed = any(reduces(handler.value) for handler in handlers.values())
        idle = {
            name
            for name, handler in handlers.items()
            if distributed and not reduces(handler.value) and int(handler.steps_applied()) == 0
        }
        return [steps for name, steps in self._counter.steps.items() if name not in idle]

    def resume_point(self, called: bool) -> None:
        if self._counter.in_loop and not self.snapshots.wrapped:
            self.snapshots.wrap()
        elif self._own_loop.watching and not called:
            self.snapshots.take_own(0)  # changes between the step and this point are kept

    def _accumulating(self) -> list[Any]:
        return [steps for steps in self.snapshots.reducing() if steps.passes > 1]

    def _totals_at_boundary(self) -> dict[str, int] | None:
        if not self.may_mark():
            return None
        self.poll()
        return dict(self._totals)

    # --- a step that failed ---------------------------------------------------------------------

    def function_left(self) -> None:
        self._state.fit_callbacks.left()
        self.poll()

    def undo_step(self, choice: Recovery) -> None:
        if choice is not Recovery.COMMIT and self.snapshots.restore():
            log.info("put back the variables that the unfinished step had changed")
        if choice is Recovery.LIVE:
            passes = max((steps.passes for steps in self.snapshots.reducing()), default=1)
            self.fit.count_applied_batches(self._totals, passes)

    def drop_unfinished(self) -> None:
        for steps in self._accumulating():
            steps.drop()
        self.fit.keep_running_metrics()

    # --- the loop -------------------------------------------------------------------------------

    def before_joining(self) -> None:
        """Trace the train step and run it once, on rows of the training data; the values are as before afterwards.

        A graph's first run creates kernels and threads, which takes longer than the steps that follow.
        """
        model = self._state.__dict__.get("model")
        session = self.fit
        if BACKEND != "tensorflow" or session.first_batch is None or session.no_batch is None:
            return
        if getattr(model, "optimizer", None) is None or model.run_eagerly:
            return
        self.snapshots.wrap()
        try:
            model.make_train_function()
            if model.built and model.optimizer.built:
                with self._state._frontend.alone(), self._values_kept(model):
                    model.train_function(session.first_batch())
            else:  # the root's variables may not exist yet, and those that a step makes here would keep its changes
                _trace(model.train_function, session.no_batch())
        except Exception as error:  # if it comes again, `fit` raises it where its caller expects that
            log.info("the train step could not be run before joining: %s", error)
            model.train_function = None

    @contextmanager
    def _values_kept(self, model: Any) -> Iterator[None]:
        """Put the variables of the state back, which a step in this context changes, and the model's metrics."""
        handlers = self._handlers.of(VariablesHandler).values()
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
            self.snapshots.discard()

    def loop_over(self) -> None:
        self._state.fit_callbacks.over()
        self.snapshots.unwrap()

    def _fit_ends(self) -> None:
        self.fit.fit_ends()
        if self._counter.in_loop and not self._counter.alone:
            self._own_loop.begin()


def _trace(train_function: Callable[[Any], Any], nothing: Any) -> None:
    """Trace a train function of TensorFlow; the iterator `nothing` has the types of the training data, and no batch."""
    import tensorflow as tf

    try:
        train_function(nothing)
    except (StopIteration, tf.errors.OutOfRangeError):
        pass

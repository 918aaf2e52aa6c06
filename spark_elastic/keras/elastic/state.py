"""KerasState: models, optimizers and plain values that outlive a change of the world."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spark_elastic.elastic.handled_state import HandledState
from spark_elastic.elastic.handled_values import StateHandler
from spark_elastic.elastic.recovery import Recovery
from spark_elastic.errors import HorovodInternalError
from spark_elastic.keras import variables as values
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.elastic.boundary import Boundary, run_on_nothing, wrap_apply, wrap_steps
from spark_elastic.keras.elastic.fit_callbacks import FitCallbacks
from spark_elastic.keras.elastic.handlers import ModelHandler, OptimizerHandler, VariablesHandler, handler_for
from spark_elastic.keras.elastic.own_loop import OwnLoop
from spark_elastic.keras.optimizer import reduces
from spark_elastic.membership.topology import StateVersion

log = logging.getLogger("spark_elastic.keras")


class KerasState(HandledState):
    """A model, its optimizer and plain values, each a keyword argument and then an attribute.

    Steps are counted by the optimizers themselves, so also those inside of one call of `steps_per_execution` batches.
    A step whose reduction failed has changed nothing once the loop goes on: the running means, seeds and metrics of the
    model that it had touched are put back. Metrics that are kept by themselves, in a loop of your own, keep what that
    step has added to them.

    Args:
        model: a Keras model, built or not, compiled or not.
        optimizer: default: the one that the model is compiled with.
        kwargs: more models, optimizers, metrics and variables, and anything else to keep, such as batch=0 and epoch=0.
    """

    model: Any
    optimizer: Any
    batch: Any
    epoch: Any
    fit_callbacks: FitCallbacks
    """What the callbacks of `fit` remember."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self._counts: dict[str, int] = {}
        self._boundaries: tuple[Boundary, Boundary] | None = None
        self._unwrap: list[Callable[[], None]] = []
        self._wrapped = False
        self._running: tuple[Any, list[Any], list[Any]] | None = None
        """The epoch in which the loop was left, and the metrics with their values then."""
        self._unbuilt = False
        self._totals: dict[str, int] = {}
        self._noted: tuple[dict[str, int], int] | None = None
        self._global_batch: int | None = None
        self._input: Callable[[], Any] | None = None
        self._put_off = 0
        self._in_step = False
        self.reentered = False
        self.nothing_left = False
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        callbacks = FitCallbacks(lambda: self.__dict__.get("epoch"))
        callbacks.reentered = lambda: object.__setattr__(self, "reentered", True)
        super().__init__(model=model, optimizer=optimizer, fit_callbacks=callbacks, **kwargs)
        self._own_loop = OwnLoop(self._follow, self._steps_now, self._counted_values, self._save_new_variables)
        callbacks.attached = self._own_loop.end
        callbacks.detached = self._fit_ends
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
        return super().progress

    @property
    def version(self) -> StateVersion | None:
        self._count_steps()
        return super().version

    def _count_steps(self) -> None:
        """Take in what the optimizers have counted since the last time."""
        if self._version is None or self._alone:
            return
        taken = 0
        for name, optimizer in self._optimizers().items():
            now = steps_of(optimizer)
            since, self._counts[name] = now - self._counts[name], now
            self._steps[name] += max(since, 0)
            self._totals[name] = self._totals.get(name, 0) + max(since, 0)
            taken += max(since, 0)
        if taken:
            self._set_version(self._version.stepped(taken))

    def _distributed(self) -> list[Any]:
        """The parts of optimizers that reduce gradients."""
        optimizers = self._optimizers().values()
        return [optimizer._steps for optimizer in optimizers if reduces(optimizer)]

    def _at_boundary(self) -> bool:
        """Whether no optimizer holds gradients of some but not all passes of a step."""
        return all(bool(steps.at_boundary()) for steps in self._distributed() if steps.passes > 1)

    def _drop_gradients(self) -> None:
        for steps in self._distributed():
            if steps.passes > 1:
                steps.drop()

    def _forget_counts(self) -> None:
        """The optimizers have been given other values."""
        for name, optimizer in self._optimizers().items():
            self._counts[name] = steps_of(optimizer)
        for boundary in self._boundaries or ():
            boundary.forget()

    # --- what users call ------------------------------------------------------------------------

    def save(self) -> None:
        self._build_optimizer()
        self._count_steps()
        super().save()

    def commit(self) -> None:
        """Make the present state the one that `restore` returns to, then check for updated hosts.

        Raises: HostsUpdatedInterrupt: the world is about to change; on every member at the same commit.
        """
        self.commit_here()
        self._check_host_updates()

    def commit_here(self) -> None:
        """Commit without asking for updated hosts; ask later, with `leave_if_updated`."""
        if self._may_mark():
            self._commit_here()

    def resume_here(self) -> None:
        """Have the loop go on from here, rather than from the commit, when a collective fails before the next step.

        It does nothing between the passes of one step.
        """
        if self._may_mark():
            self._count_mark()
            self._mark_resume_point()

    def _may_mark(self) -> bool:
        return super()._may_mark() and self._at_boundary()

    def leave_if_updated(self) -> None:
        """Raises: HostsUpdatedInterrupt: the world is about to change; on every member at the same call."""
        self._check_host_updates()

    def check_host_updates(self) -> None:
        """Leave the loop if the world is about to change. Cheaper than a commit: no tensor is copied.

        Raises: HostsUpdatedInterrupt: on every member at the same check.
        """
        self.resume_here()
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

    def _take_up_more(self, kept: Any) -> None:
        self._adopt_optimizer()
        super()._take_up_more(kept)
        self._forget_counts()

    def _tell(self) -> bool:
        return not all(handler.built() for handler in self._model_handlers())

    def _told(self, told: bool) -> None:
        # a root whose model has no variables yet could send none
        self._unbuilt = told

    def _may_leave(self) -> bool:
        """Not between the passes of one step, whose gradients would be lost; unless the loop only ever checks there."""
        if self._at_boundary():
            self._put_off = 0
            return True
        self._put_off += 1
        return self._put_off > 2 * max(steps.passes for steps in self._distributed())

    def sync_if_built_late(self) -> None:
        """Take over the variables of a model that the root had not built when the state was synchronised.

        Every member calls it after each batch. A model may be built as late as with its first step, and that step was
        everybody's own.
        """
        if self._unbuilt:
            self._count_steps()
            self.sync()
            self._unbuilt = False
            self.save()

    def _recover(self, error: HorovodInternalError) -> None:
        self.fit_callbacks.left()
        self._count_steps()
        super()._recover(error)
        self._drop_gradients()
        self._keep_running_metrics()

    def _interrupted(self) -> None:
        self.fit_callbacks.left()
        self._drop_gradients()
        self._keep_running_metrics()

    def _mark_resume_point(self, committed: bool = False, called: bool = False) -> None:
        self._count_steps()
        super()._mark_resume_point(committed, called)
        if self._in_loop and not self._wrapped:
            self._wrap_steps()
        elif self._own_loop.watching and not called:
            self._mark_own(0)  # what was changed between the step and this point stays

    def _call_begins(self) -> None:
        if not self._only_optimizers_act:
            self._own_loop.begin()

    def _fit_ends(self) -> None:
        """What follows in the loop is not a `fit` with callbacks of ours, until the next one begins."""
        self._noted = None
        if self._in_loop and not self._alone:
            self._call_begins()

    def _counted_values(self) -> dict[str, Any]:
        """Copies of the plain values, without a model or optimizer that was not given."""
        found = self._plain_values()
        return {name: value for name, value in found.items() if value is not None or name not in ("model", "optimizer")}

    def _save_new_variables(self) -> None:
        """Add to the last commit what has been built since then, and was not trained yet."""
        for handler in self._handlers.values():
            if isinstance(handler, VariablesHandler):
                handler.save_new()

    def _steps_now(self) -> tuple[int, ...]:
        return tuple(map(steps_of, self._optimizers().values()))

    def _amid(self, error: HorovodInternalError) -> bool:
        return self._own_loop.watching and self._own_loop.counts_rarely

    def _steps_since_resume_point(self) -> list[int]:
        """Without a plain optimizer that has never stepped beside those that reduce: what `compile` chooses for a model
        whose train step has optimizers of its own."""
        optimizers = self._optimizers()
        distributed = any(map(reduces, optimizers.values()))
        idle = {
            name
            for name, optimizer in optimizers.items()
            if distributed and not reduces(optimizer) and steps_of(optimizer) == 0
        }
        return [steps for name, steps in self._steps.items() if name not in idle]

    def _settle(self, choice: Recovery) -> None:
        if choice is not Recovery.COMMIT:
            undone = [boundary.put_back() for boundary in self._boundaries or ()]
            if any(undone):
                log.info("put back what the unfinished step had changed")
        if choice is Recovery.LIVE and self._noted is not None:
            # of several steps in one execution, and of several passes in one step, some have been applied
            then, batch = self._noted
            missed = max((total - then.get(name, 0) for name, total in self._totals.items()), default=0)
            passes = max((each.passes for each in self._distributed()), default=1)
            self.batch = batch + missed * passes

    def note_batch(self) -> None:
        """`batch` has been set to the number of batches that are done."""
        if self._at_boundary():
            self._count_steps()
            self._noted = dict(self._totals), self.batch

    def _left_loop(self) -> None:
        self._own_loop.end()
        super()._left_loop()
        self.fit_callbacks.over()
        for undo in self._unwrap:
            undo()
        self._unwrap, self._wrapped = [], False
        for steps in self._distributed():
            steps.before_update = None

    def will_train_on(self, dataset: Callable[[], Any]) -> None:
        """What `fit` will be called with: gives a `tf.data.Dataset` that is empty until an epoch begins."""
        self._input = dataset

    def _before_joining(self) -> None:
        """Trace the train step, by running it on no batch at all."""
        model: Any = self.__dict__.get("model")
        if BACKEND != "tensorflow" or self._input is None or getattr(model, "optimizer", None) is None:
            return
        if model.run_eagerly:
            return
        self._wrap_steps()
        try:
            model.make_train_function()
            run_on_nothing(model.train_function, self._input())
        except Exception as error:  # if it is no fluke, `fit` says it again where its caller expects that
            log.info("the train step could not be traced before joining: %s", error)
            model.train_function = None

    # --- around each step -----------------------------------------------------------------------

    def weigh_by_rows(self, global_batch: int) -> None:
        """Have each member's gradient count by the rows it was made of.

        global_batch: rows of a step on all members together; only the scale, which no result depends on.
        """
        self._global_batch = global_batch

    def _wrap_steps(self) -> None:
        """See `boundary`: steps of `fit` are marked where they start, with the metrics; those of other loops where
        their gradients have arrived, when running means are what they will be."""
        self._wrapped = True
        if self._boundaries is None:
            own = Boundary(lambda: self._step_variables(metrics=False), self._applied)
            self._boundaries = Boundary(lambda: self._step_variables(metrics=True), self._applied), own
        fit, own = self._boundaries
        own.prepare()
        for model in self._models().values():
            if hasattr(model, "train_step"):
                self._unwrap.append(wrap_steps(model, fit.prepare, self._around_step, lambda: self.nothing_left))
        for optimizer in self._optimizers().values():
            if reduces(optimizer):
                optimizer._steps.before_update = lambda: self._mark_own(0)  # counted already
            else:
                self._unwrap.append(wrap_apply(optimizer, lambda: self._mark_own(1), self._save_new_variables))

    def _mark_own(self, ahead: int) -> None:
        if self._boundaries is not None and not self._in_step:
            self._boundaries[1].mark(ahead=ahead)

    @contextmanager
    def _around_step(self, data: Any) -> Iterator[None]:
        assert self._boundaries is not None
        several = [steps for steps in self._distributed() if steps.passes > 1]
        self._boundaries[0].mark(several[0].at_boundary() if several else True)
        self._in_step = True
        try:
            with self._weighed(data):
                yield
            self._boundaries[0].prepare()
        finally:
            self._in_step = False

    @contextmanager
    def _weighed(self, data: Any) -> Iterator[None]:
        if self._global_batch is None:
            yield
            return
        weight = values.rows_of(data) / self._global_batch
        for steps in self._distributed():
            steps.weight = weight
        try:
            yield
        finally:
            for steps in self._distributed():
                steps.weight = None

    def _step_variables(self, metrics: bool) -> list[Any]:
        found = {id(v): v for handler in self._model_handlers() for v in handler.step_variables(metrics)}
        return list(found.values())

    def _applied(self) -> Any:
        """Steps of all optimizers together, as a tensor in a graph."""
        counts = [count_of(optimizer) for optimizer in self._optimizers().values()]
        return sum(counts[1:], start=counts[0]) if counts else 0

    # --- metrics of an epoch that goes on in another call of fit ----------------------------------

    def _keep_running_metrics(self) -> None:
        counting = self._metrics_variables()
        self._running = self.__dict__.get("epoch"), counting, values.copies_of(counting)
        self.reentered = True

    def put_running_metrics_back(self) -> None:
        """Have the metrics of the model go on where they were when the loop was left.

        Keras sets them to zero when `fit` is entered. Called at the beginning of the epoch, it makes the epoch's
        metrics those of all its batches; if the epoch is not the one that was left, it does nothing.
        """
        running, self._running = self._running, None
        if running is None or running[0] != self.__dict__.get("epoch") or not self.__dict__.get("batch"):
            return
        _, counting, copies = running
        if [id(variable) for variable in counting] == [id(variable) for variable in self._metrics_variables()]:
            values.put_back(counting, copies)

    def _metrics_variables(self) -> list[Any]:
        return list(getattr(self.__dict__.get("model"), "metrics_variables", ()))


def count_of(optimizer: Any) -> Any:
    """Steps applied by an optimizer: a number, or a tensor that is one when it is evaluated."""
    if reduces(optimizer):
        return optimizer.steps_applied()  # also those that were skipped
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._iterations.value


def steps_of(optimizer: Any) -> int:
    """Steps applied by an optimizer."""
    return int(count_of(optimizer))

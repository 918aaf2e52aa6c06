"""Snapshots that the steps of `model.fit` take at their start, so that an unfinished step can be undone.

A step updates running means, seeds and metrics before the reduction of its gradients, or in a graph in parallel to it.
So these few variables are copied at the start of each step, inside of the same graph, together with the number of steps
applied so far. If a collective fails and that number is still the same, the step was not applied, and is undone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from spark_elastic.elastic.handlers import Handlers
from spark_elastic.keras import backend
from spark_elastic.keras.backend import BACKEND, Variable
from spark_elastic.keras.elastic.fit_session import FitSession
from spark_elastic.keras.elastic.handlers import ModelHandler, OptimizerHandler, VariablesHandler
from spark_elastic.keras.optimizer import build_for, reduces


class SnapshottedSteps:
    """Makes the steps of `fit` take snapshots, and those of all loops count only once their gradients are there.

    `built` is called when a step has built a model or an optimizer.
    """

    def __init__(self, handlers: Handlers, session: FitSession, built: Callable[[], None]) -> None:
        self.wrapped = False
        self._handlers = handlers
        self._session = session
        self._built = built
        self._undo: list[Callable[[], None]] = []
        self._copied: list[Variable] = []
        self._copies: dict[int, Any] = {}
        """The copies made at the start of the last step, by the id of the variable."""
        self._at: Any = None
        """The number of steps applied when the copies were made."""

    # --- the wrapped steps ------------------------------------------------------------------------

    def wrap(self) -> None:
        self.wrapped = True
        for handler in self._handlers.of_type(ModelHandler).values():
            if not handler.built():
                self._wrap_build(handler.value)
            if hasattr(handler.value, "train_step"):
                self._wrap_train_step(handler.value)
        for optimizer in self._optimizers():
            self._wrap_apply(optimizer)

    def unwrap(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo, self.wrapped = [], False

    def _replace(self, owner: Any, **functions: Callable[..., Any]) -> None:
        """Replace methods of a model or an optimizer, without Keras's tracking, until `unwrap`."""
        before = {name: vars(owner)[name] for name in functions if name in vars(owner)}
        for name, function in functions.items():
            object.__setattr__(owner, name, function)

        def undo() -> None:
            for name, function in functions.items():
                if vars(owner).get(name) is not function:
                    continue
                if name in before:
                    object.__setattr__(owner, name, before[name])
                else:
                    object.__delattr__(owner, name)

        self._undo.append(undo)

    def _wrap_build(self, model: Any) -> None:
        """Let `build` of a model give variables their values at once, also in a graph.

        The pass that builds a model also updates its running means; a failed step returns them to their initial values.
        """
        plain = model.build

        @functools.wraps(plain)
        def build(*args: Any, **kwargs: Any) -> None:
            with backend.outside_of_graphs():
                plain(*args, **kwargs)
            self._built()

        self._replace(model, build=build)

    def _wrap_apply(self, optimizer: Any) -> None:
        """Let `apply` of an optimizer build it first and, in a graph, wait for the gradients.

        The count of iterations does not depend on them: it would be incremented beside a reduction that fails.
        """
        plain = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> None:
            grads = list(grads)
            variables = None if trainable_variables is None else list(trainable_variables)
            if variables and not optimizer.built:
                build_for(optimizer, variables)
                self._built()
            with nullcontext() if reduces(optimizer) else backend.after(grads):
                plain(grads, variables)

        self._replace(optimizer, apply=apply)

    def _wrap_train_step(self, model: Any) -> None:
        """Let the train step of a model take snapshots.

        If the epoch was left after its last batch, `fit` ends it without a step, with the model's metrics as its logs:
        a graph without data would still run those of its operations that do not depend on the data.
        """
        plain_step, plain_make = model.train_step, model.make_train_function
        plain_logs: Any = getattr(model, "_get_metrics_result_or_logs", None)

        def train_step(data: Any) -> Any:
            with self._around_step(data):
                return plain_step(data)

        def make_train_function(*args: Any, **kwargs: Any) -> Any:
            self._prepare()
            plain_make(*args, **kwargs)
            plain_function = model.train_function
            if not hasattr(plain_function, "ends_epochs"):

                def train_function(data: Any) -> Any:
                    if self._session.nothing_left:
                        raise StopIteration
                    return plain_function(data)

                train_function.ends_epochs = True  # type: ignore[attr-defined]
                model.train_function = train_function
            return model.train_function

        def metrics_or_logs(logs: Any) -> Any:
            return plain_logs(logs) if logs else model.get_metrics_result()

        def forget_function() -> None:
            model.train_function = None

        self._replace(model, train_step=train_step, make_train_function=make_train_function)
        if plain_logs is not None:
            self._replace(model, _get_metrics_result_or_logs=metrics_or_logs)
        forget_function()  # it was made of the plain step
        self._undo.append(forget_function)

    @contextmanager
    def _around_step(self, data: Any) -> Iterator[None]:
        several = [steps for steps in self.reducing() if steps.passes > 1]
        self._take(several[0].at_boundary() if several else True)
        global_batch = self._session.global_batch
        weighted = [] if global_batch is None else self.reducing()
        try:
            for steps in weighted:
                steps.weight = backend.rows_of(data) / global_batch
            yield
            self._prepare()
        finally:
            for steps in weighted:
                steps.weight = None

    # --- variables --------------------------------------------------------------------------------

    def untrained(self) -> list[Any]:
        """Return what steps change besides through optimizers: running means, seeds, metrics, but no frozen weights."""
        found = []
        for handler in self._handlers.of_type(VariablesHandler).values():
            if isinstance(handler, ModelHandler):
                trained = set(map(id, handler.trained()))
                found += [variable for variable in handler.value.variables if id(variable) not in trained]
                found += handler.value.metrics_variables
            elif not isinstance(handler, OptimizerHandler):
                found += [variable for variable in handler.variables() if not variable.trainable]
        return list({id(variable): variable for variable in found}.values())

    def reducing(self) -> list[Any]:
        """Return, for each optimizer that reduces gradients, the object that does so (`optimizer._steps`)."""
        return [optimizer._steps for optimizer in self._optimizers() if reduces(optimizer)]

    def _optimizers(self) -> list[Any]:
        return [handler.value for handler in self._handlers.of_type(OptimizerHandler).values()]

    def _applied(self) -> Any:
        """Return the number of steps that all optimizers together have applied; in a graph, a tensor."""
        counts = [handler.steps_applied() for handler in self._handlers.of_type(OptimizerHandler).values()]
        return sum(counts[1:], start=counts[0]) if counts else 0

    # --- snapshots --------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Create variables for copies that have none; TensorFlow allows that in a step's first trace only."""
        self._copied = self.untrained()
        if BACKEND == "torch":
            return
        import tensorflow as tf

        if self._at is None:
            self._at = tf.Variable(lambda: tf.constant(-1, tf.int64), trainable=False, name="at_step")
        for variable in self._copied:
            if id(variable) not in self._copies:
                own = variable.value
                zeros = functools.partial(tf.zeros, own.shape, own.dtype)
                self._copies[id(variable)] = tf.Variable(zeros, trainable=False)

    def _take(self, begins: Any) -> None:
        """Take the snapshot if a step begins (in a graph, a tensor); in a graph, it becomes part of the step."""
        if BACKEND == "torch":
            if begins:
                self._copies = dict(zip(map(id, self._copied), backend.copy_values(self._copied), strict=True))
                self._at = int(self._applied())
            return
        import tensorflow as tf

        def take() -> Any:
            if self._at is not None:  # else nothing was prepared before this was traced
                # an assignment shares the buffer, which TensorFlow copies when the variable is changed next
                for variable in self._copied:
                    self._copies[id(variable)].assign(variable.value.read_value(), read_value=False)
                self._at.assign(self._applied(), read_value=False)
            return tf.constant(True)

        if begins is True:
            take()
        else:
            tf.cond(begins, take, lambda: tf.constant(False))

    def restore(self) -> bool:
        """Undo the last step if it was not applied; return True if so."""
        if self._at is None or int(self._at) != int(self._applied()):
            return False
        copies = [self._copies[id(variable)] for variable in self._copied]
        backend.restore_values(self._copied, copies if BACKEND == "torch" else [copy.read_value() for copy in copies])
        return True

    def discard(self) -> None:
        """Discard the copies, because the variables have been given other values."""
        if BACKEND == "torch":
            self._at = None
        elif self._at is not None:
            self._at.assign(-1, read_value=False)

"""Snapshots that the steps of `model.fit` take at their start, so that an unfinished step can be undone.

A step updates running means, seeds and metrics before the reduction of its gradients, or in a graph in parallel to it.
So these few variables are copied at the start of each step, inside of the same graph, together with the number of steps
applied so far. If a collective fails and that number is still the same, the step was not applied, and is undone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from spark_elastic.elastic.handlers import Handlers
from spark_elastic.keras import backend
from spark_elastic.keras.backend import BACKEND, Variable
from spark_elastic.keras.elastic.fit_session import FitSession
from spark_elastic.keras.elastic.handlers import ModelHandler, OptimizerHandler, VariablesHandler
from spark_elastic.keras.optimizer import build_for, reduces


class StepSnapshot:
    """Copies of variables, made at the start of the last step, and the number of steps applied until then."""

    def __init__(self, variables: Callable[[], list[Variable]], steps: Callable[[], Any]) -> None:
        self._variables = variables
        self._steps = steps
        self._copied: list[Variable] = []
        self._copies: dict[int, Any] = {}
        self._at: Any = None
        """The number of steps applied when the copies were made."""

    def prepare(self) -> None:
        """Create TensorFlow variables for the copies that have none yet.

        This is called before a step is traced, and at its end: the first trace of a step may create metrics and parts
        of models, and TensorFlow allows new variables in that trace only.
        """
        self._copied = self._variables()
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

    def take(self, begins: Any) -> None:
        """Take the snapshot if a step begins (in a graph, a tensor); in a graph, it becomes part of the step."""
        if BACKEND == "torch":
            if begins:
                self._copies = dict(zip(map(id, self._copied), backend.copy_values(self._copied), strict=True))
                self._at = int(self._steps())
        elif begins is True:
            self._take_in_tensorflow()
        else:
            import tensorflow as tf

            def take() -> Any:
                self._take_in_tensorflow()
                return tf.constant(True)

            tf.cond(begins, take, lambda: tf.constant(False))

    def _take_in_tensorflow(self) -> None:
        if self._at is None:
            return  # nothing was prepared before this was traced
        # an assignment shares the buffer, which TensorFlow copies when the variable is changed next
        for variable in self._copied:
            self._copies[id(variable)].assign(variable.value.read_value(), read_value=False)
        self._at.assign(self._steps(), read_value=False)

    def restore(self) -> bool:
        """Undo the last step if it was not applied; return True if so."""
        if self._at is None or int(self._at) != int(self._steps()):
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


class SnapshottedSteps:
    """Makes the steps of `fit` take snapshots, and those of all loops count only once their gradients are there.

    `built` is called when a step has built a model or an optimizer.
    """

    def __init__(self, handlers: Handlers, session: FitSession, built: Callable[[], None]) -> None:
        self.wrapped = False
        self._handlers = handlers
        self._session = session
        self._built = built
        self.snapshot = StepSnapshot(self.untrained, self._applied)
        self._undo: list[Callable[[], None]] = []

    def wrap(self) -> None:
        self.wrapped = True
        for handler in self._handlers.of_type(ModelHandler).values():
            if not handler.built():
                self._undo.append(wrap_build(handler.value, self._built))
            if hasattr(handler.value, "train_step"):
                self._undo.append(
                    wrap_train_step(handler.value, self.snapshot.prepare, self._around_step, self._session)
                )
        for optimizer in self._optimizers():
            self._undo.append(wrap_apply(optimizer, self._built))

    def unwrap(self) -> None:
        for undo in self._undo:
            undo()
        self._undo, self.wrapped = [], False

    def untrained(self) -> list[Any]:
        """Return the variables of the state that steps change besides through optimizers, without frozen weights."""
        found = []
        for handler in self._handlers.of_type(VariablesHandler).values():
            if isinstance(handler, ModelHandler):
                found += handler.step_variables()
            elif not isinstance(handler, OptimizerHandler):
                found += [variable for variable in handler.variables() if not variable.trainable]
        return list({id(variable): variable for variable in found}.values())

    def reducing(self) -> list[Any]:
        """Return, for each optimizer that reduces gradients, the object that does so (`optimizer._steps`)."""
        return [optimizer._steps for optimizer in self._optimizers() if reduces(optimizer)]

    def _optimizers(self) -> list[Any]:
        return [handler.value for handler in self._handlers.of_type(OptimizerHandler).values()]

    @contextmanager
    def _around_step(self, data: Any) -> Iterator[None]:
        several = [steps for steps in self.reducing() if steps.passes > 1]
        self.snapshot.take(several[0].at_boundary() if several else True)
        global_batch = self._session.global_batch
        weighted = [] if global_batch is None else self.reducing()
        try:
            for steps in weighted:
                steps.weight = backend.rows_of(data) / global_batch
            yield
            self.snapshot.prepare()
        finally:
            for steps in weighted:
                steps.weight = None

    def _applied(self) -> Any:
        """Return the number of steps that all optimizers together have applied; in a graph, a tensor."""
        counts = [handler.steps_applied() for handler in self._handlers.of_type(OptimizerHandler).values()]
        return sum(counts[1:], start=counts[0]) if counts else 0


def wrap_build(model: Any, built: Callable[[], None]) -> Callable[[], None]:
    """Replace `build` of a model by one that gives variables their values at once, also in a graph, and calls `built`.

    The forward pass that builds a model also updates its running means, which a failed step has to return to their
    initial values.

    Returns: a function that restores `build`.
    """
    plain = model.build

    @functools.wraps(plain)
    def build(*args: Any, **kwargs: Any) -> None:
        with backend.outside_of_graphs():
            plain(*args, **kwargs)
        built()

    object.__setattr__(model, "build", build)

    def undo() -> None:
        if model.__dict__.get("build") is build:
            object.__setattr__(model, "build", plain)

    return undo


def wrap_apply(optimizer: Any, built: Callable[[], None]) -> Callable[[], None]:
    """Replace `apply` of an optimizer by a function that builds it first and, in a graph, waits for the gradients.

    Without that the optimizer's count of iterations, which does not depend on the gradients, would be incremented in
    parallel to a reduction that fails. `built` is called when the optimizer has been built for its first step.

    Returns: a function that restores `apply`.
    """
    plain = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if variables and not optimizer.built:
            build_for(optimizer, variables)
            built()
        with nullcontext() if reduces(optimizer) else _after(grads):
            plain(grads, variables)

    object.__setattr__(optimizer, "apply", apply)

    def undo() -> None:
        if optimizer.__dict__.get("apply") is apply:
            object.__delattr__(optimizer, "apply")

    return undo


def _after(grads: list[Any]) -> AbstractContextManager[Any]:
    if BACKEND == "torch":
        return nullcontext()
    import tensorflow as tf

    present = tf.nest.flatten([grad for grad in grads if grad is not None], expand_composites=True)
    context: AbstractContextManager[Any] = tf.control_dependencies(present)
    return context


def wrap_train_step(
    model: Any, prepare: Callable[[], None], around: Callable[[Any], AbstractContextManager[None]], session: FitSession
) -> Callable[[], None]:
    """Replace the train step of a model by one that runs inside of `around(data)`; `prepare` precedes its trace.

    If the epoch was left after its last batch, `fit` ends it without a step, with the model's metrics as its logs: a
    graph without data would still run those of its operations that do not depend on the data.

    Returns: a function that restores the train step.
    """
    plain_step, plain_make = model.train_step, model.make_train_function

    def train_step(data: Any) -> Any:
        with around(data):
            return plain_step(data)

    def make_train_function(*args: Any, **kwargs: Any) -> Any:
        prepare()
        plain_make(*args, **kwargs)
        plain_function = model.train_function
        if not hasattr(plain_function, "ends_epochs"):

            def train_function(data: Any) -> Any:
                if session.nothing_left:
                    raise StopIteration
                return plain_function(data)

            train_function.ends_epochs = True  # type: ignore[attr-defined]
            model.train_function = train_function
        return model.train_function

    plain_logs: Any = getattr(model, "_get_metrics_result_or_logs", None)

    def metrics_or_logs(logs: Any) -> Any:
        return plain_logs(logs) if logs else model.get_metrics_result()

    patched: dict[str, Any] = {"train_step": train_step, "make_train_function": make_train_function}
    if plain_logs is not None:
        patched["_get_metrics_result_or_logs"] = metrics_or_logs
    for name, function in patched.items():
        object.__setattr__(model, name, function)
    model.train_function = None  # it was made of the plain step

    def undo() -> None:
        for name, function in patched.items():
            if model.__dict__.get(name) is function:
                object.__delattr__(model, name)
        model.train_function = None

    return undo

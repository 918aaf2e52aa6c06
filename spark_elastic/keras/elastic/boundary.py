"""What a step has changed besides through its optimizer, so that it can be put back when the step is done again.

A step updates running means, seeds and metrics before (in a graph: beside) the reduction that fails. So at the start of
each step these few variables are copied, inside of the same graph, together with the number of steps applied until
then. If that number has not changed when a collective has failed, the step is one that will be done again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from spark_elastic.keras import variables as values
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.optimizer import build_for
from spark_elastic.keras.variables import Variable


class Boundary:
    """The values of some variables at the start of the step that runs, or was the last to run.

    Args:
        variables: gives those of the models, as they are now.
        steps: gives the tensor or number of steps applied so far, in a graph as well.
    """

    def __init__(self, variables: Callable[[], list[Variable]], steps: Callable[[], Any]) -> None:
        self._variables = variables
        self._steps = steps
        self._marked: list[Variable] = []
        self._copies: dict[int, Any] = {}
        self._at: Any = None

    def prepare(self) -> None:
        """Make room for the copies of variables that are new.

        Called before a step is traced, and at its end: metrics and models come into being when their first step is
        traced, and may then bring variables of ours with them. TensorFlow traces it a second time without that.
        """
        self._marked = self._variables()
        if BACKEND == "torch":
            return
        import tensorflow as tf

        if self._at is None:
            self._at = tf.Variable(lambda: tf.constant(-1, tf.int64), trainable=False, name="at_step")
        for variable in self._marked:
            if id(variable) not in self._copies:
                own = variable.value
                zeros = functools.partial(tf.zeros, own.shape, own.dtype)
                self._copies[id(variable)] = tf.Variable(zeros, trainable=False)

    def mark(self, begins: Any = True, ahead: int = 0) -> None:
        """A step starts here. May be called in a graph, and is traced with it then.

        begins: False, or a tensor that is, in the later passes of a step whose gradients are added up over several.
        ahead: steps that will be counted until the next one starts.
        """
        if BACKEND == "torch":
            if begins:
                self._copies = dict(zip(map(id, self._marked), values.copies_of(self._marked), strict=True))
                self._at = int(self._steps()) + ahead
        elif begins is True:
            self._mark_tensorflow(ahead)
        else:
            import tensorflow as tf

            def mark() -> Any:
                self._mark_tensorflow(ahead)
                return tf.constant(True)

            tf.cond(begins, mark, lambda: tf.constant(False))

    def _mark_tensorflow(self, ahead: int) -> None:
        if self._at is None:
            return  # nothing was prepared before this was traced
        # an assignment shares the buffer; whoever changes the variable next copies it first
        for variable in self._marked:
            self._copies[id(variable)].assign(variable.value.read_value(), read_value=False)
        self._at.assign(self._steps() + ahead, read_value=False)

    def put_back(self) -> bool:
        """Undo the step that was started and not applied; whether there was one."""
        if self._at is None or int(self._at) != int(self._steps()):
            return False
        values.put_back(self._marked, [_value(self._copies[id(variable)]) for variable in self._marked])
        return True

    def forget(self) -> None:
        """The variables have been given other values since."""
        if BACKEND == "torch":
            self._at = None
        elif self._at is not None:
            self._at.assign(-1, read_value=False)  # what it returns otherwise cannot be used in a graph


def _value(copy: Any) -> Any:
    return copy if BACKEND == "torch" else copy.read_value()


def wrap_apply(optimizer: Any, before: Callable[[], None], built: Callable[[], None]) -> Callable[[], None]:
    """Have `before()` called whenever an optimizer has its gradients and is about to apply them.

    built: called when it has been built for its first step.

    In a graph both wait for the gradients. By itself the optimizer's count of iterations does not, and would be raised
    beside a reduction that fails.

    Returns: what undoes it.
    """
    plain = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if variables and not optimizer.built:
            build_for(optimizer, variables)
            built()
        with _after(grads):
            before()
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

    present = [grad for grad in grads if grad is not None]
    context: AbstractContextManager[Any] = tf.control_dependencies(
        [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in present]
    )
    return context


def wrap_steps(
    model: Any,
    prepare: Callable[[], None],
    around: Callable[[Any], AbstractContextManager[None]],
    nothing_left: Callable[[], bool],
) -> Callable[[], None]:
    """Have every train step of the model run inside of `around(data)`, and `prepare()` called before it is traced.

    nothing_left: whether the epoch was left after its last batch. `fit` then ends it without a step: in a graph, what
    does not depend on the data would be done once more. Its metrics are those that the model has.

    Returns: what undoes it.
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
                if nothing_left():
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
    model.train_function = None  # made of the step as it was

    def undo() -> None:
        for name, function in patched.items():
            if model.__dict__.get(name) is function:
                object.__delattr__(model, name)
        model.train_function = None

    return undo


def run_on_nothing(train_function: Callable[[Any], Any], dataset: Any) -> None:
    """Trace and optimise a train function of TensorFlow, without a step: `dataset` has the right types and no batch."""
    import tensorflow as tf

    try:
        train_function(iter(dataset))
    except (StopIteration, tf.errors.OutOfRangeError):
        pass

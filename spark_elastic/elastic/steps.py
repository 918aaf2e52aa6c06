"""The steps of a state's optimizers, and the loop that makes them.

Each framework gives an `ElasticState` three strategies: a function that chooses the `StateHandler` of a value, a
subclass of `LoopWatch` and one of `OptimizerSteps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spark_elastic.elastic.handlers import Handlers
from spark_elastic.elastic.recovery import Recovery
from spark_elastic.elastic.undo_log import UndoLog
from spark_elastic.errors import HorovodInternalError
from spark_elastic.membership.topology import StateVersion


class StepCounter:
    """The version of a state, and the steps that its optimizers have made since the last resume point."""

    def __init__(self, report: Callable[[StateVersion], None]) -> None:
        self.version: StateVersion | None = None
        """None before the state was first synchronised."""
        self.saved_version: StateVersion | None = None
        """The version that `restore` returns to."""
        self.steps: dict[str, int] = {}
        """Steps since the last resume point, by the name of the optimizer."""
        self.in_loop = False
        """The state is inside of `elastic.run`."""
        self.alone = False
        """Reset callbacks run: their steps and commits are this member's own and count for nothing."""
        self._report = report

    def set(self, version: StateVersion) -> None:
        self.version = version
        self._report(version)

    def advance(self, steps: int = 1) -> None:
        if self.version is not None and not self.alone:
            self.set(self.version.stepped(steps))

    def mark(self) -> None:
        """Count a resume point."""
        if self.version is not None:
            self.set(self.version.marked())

    def stepped(self, optimizer: str) -> None:
        self.steps[optimizer] += 1
        self.advance()

    def reset_steps(self) -> None:
        for name in self.steps:
            self.steps[name] = 0


class LoopWatch:
    """Watches how a loop changes the state around its steps, so that the changes of a failed step can be undone.

    This base class watches nothing. It is for loops, such as those of the estimators, in which only optimizers change
    tensors and all plain values change after the step. Subclasses watch the loops of users.
    """

    def __init__(self, handlers: Handlers, counter: StepCounter) -> None:
        self.log = UndoLog()
        self._handlers = handlers
        self._counter = counter

    def begin(self) -> None:
        """Start watching: the loop's function is about to be called, or has a resume point before its first step."""

    def end(self) -> None:
        """Stop watching."""
        self.log.end()

    def entering(self, optimizer: str) -> None:
        """Note that an optimizer has the reduced gradients of a step."""

    def resume_point(self, committed: bool) -> None:
        """Note the present tensors, at a resume point; `committed`: a copy of them exists."""

    def altered(self, stepped: bool) -> bool:
        """Return True if something else than optimizers changed tensors, see `Failure.altered`.

        Args:
            stepped: Steps were applied since the last resume point.
        """
        return False

    def amid(self, error: HorovodInternalError) -> bool:
        """Return True if the loop may stand between steps that it counts together, see `Failure.amid`."""
        return False

    def undone(self) -> dict[str, Any] | None:
        """Return the values to set before the failed step is made again; None if that is unknown."""
        return self.log.undone(self.value_of)

    def value_of(self, name: str) -> Any:
        return getattr(self._handlers.owner, name)

    def put_back(self, values: Mapping[str, Any]) -> None:
        self._handlers.plain.assign(values)


class OptimizerSteps:
    """Counts the steps of a state's optimizers, tells where a step ends, and undoes an unfinished one.

    This base class is for optimizers whose owner calls `StepCounter.stepped`.
    """

    def __init__(self, handlers: Handlers, counter: StepCounter, watch: LoopWatch) -> None:
        self._handlers = handlers
        self._counter = counter
        self._watch = watch

    # --- the values ---------------------------------------------------------------------------------

    def attach(self, name: str) -> None:
        """Follow a value that is new in the state, if it is an optimizer."""

    def before_save(self) -> None:
        """Prepare the values for a copy."""

    def before_sync(self) -> None:
        """Prepare the values for being taken over from another member."""

    def values_replaced(self) -> None:
        """Forget what was counted by the values that the optimizers had: they have been given others."""

    # --- steps --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Count the steps that were made since the last call, if optimizers do not report them."""

    def may_mark(self) -> bool:
        """Return True if training can resume from here: not in the middle of a step. The same on every member."""
        return True

    def may_leave(self) -> bool:
        """Return True if the loop can be left here without losing work. The same on every member."""
        return True

    def since_resume_point(self) -> list[int]:
        """Return the steps since the last resume point of each optimizer that takes part in the training."""
        return list(self._counter.steps.values())

    def resume_point(self, called: bool) -> None:
        """Copy what steps change besides through optimizers: running means, seeds, metrics, rows done.

        Args:
            called: The loop's function is about to be called.
        """

    # --- a step that failed -------------------------------------------------------------------------

    def function_left(self) -> None:
        """Note that the loop's function has raised, before any value is put back."""

    def undo_step(self, choice: Recovery) -> None:
        """Put back what the unfinished step has changed and `choice` has left."""

    def drop_unfinished(self) -> None:
        """Drop the gradients of the unfinished step: a loop may zero them only after a step, and would add to them."""

    # --- the loop -----------------------------------------------------------------------------------

    def before_joining(self) -> None:
        """Do what would take long in a newcomer's first step, see `State._before_joining`."""

    def loop_over(self) -> None:
        """Stop following optimizers and models: the loop has returned or raised."""

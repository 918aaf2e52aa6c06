"""Count the steps of a state's optimizers, and decide which state to resume from after a failed collective.

Each framework gives an `ElasticState` three strategies: a function that chooses the `StateHandler` of a value, a
subclass of `LoopWatch` and one of `OptimizerSteps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spark_elastic.elastic.handlers import Handlers
from spark_elastic.elastic.plain_values import UndoLog
from spark_elastic.errors import HorovodInternalError
from spark_elastic.membership.topology import StateVersion


class Recovery(Enum):
    """The values that the next world starts from."""

    RESUME_POINT = "resume point"
    """Tensors as they are, and the plain values of the last resume point. No optimizer has stepped since."""
    LIVE = "live"
    """Everything as it is: the failed step has changed nothing yet."""
    COMMIT = "commit"
    """Tensors and plain values as copied by the last commit."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Facts about a collective that failed inside the elastic loop.

    Attributes:
        steps: For each optimizer in the state, the steps it has applied since the last resume point (a commit, a check
            for updated hosts, or the entry of the loop).
        in_reduction: The failed collective was the gradient reduction of a `DistributedOptimizer`.
        mid_update: An optimizer had begun to change parameters and did not finish.
        committed: The last resume point was a commit, which copied the tensors.
        altered: If no step was applied since the last resume point: something else than the optimizers has changed
            tensors. Otherwise: the loop changes tensors before its first step, and may have done so for the next one.
        amid: The loop makes several steps before it counts, and the failure may be between two of them.
    """

    steps: Sequence[int]
    in_reduction: bool
    mid_update: bool = False
    committed: bool = False
    altered: bool = False
    amid: bool = False


def decide(failure: Failure) -> tuple[Recovery, str]:
    """Return the state to resume from, and the reason as a sentence; a pure function.

    Without an optimizer it is unknown when the model changes, so only the commit is safe. With several optimizers, the
    live values are complete at the entry of a step only if all optimizers have applied equally many steps.
    """
    if not failure.steps:
        return Recovery.COMMIT, "no optimizer in the state says when the model changes"
    if failure.mid_update:
        return Recovery.COMMIT, "an optimizer had begun to change the parameters"
    if not any(failure.steps) and failure.committed:
        return Recovery.COMMIT, "no step was applied since the last commit"
    if failure.altered:
        return Recovery.COMMIT, "something else than an optimizer has changed tensors on the way to the step"
    if not any(failure.steps):
        return Recovery.RESUME_POINT, "no step was applied since the last resume point"
    if not failure.in_reduction:
        return Recovery.COMMIT, f"a collective outside the optimizer failed {max(failure.steps)} steps after a commit"
    if len(set(failure.steps)) > 1:
        return Recovery.COMMIT, f"the optimizers have made unequal numbers of steps, {list(failure.steps)}"
    if failure.amid:
        return Recovery.COMMIT, "the loop makes several steps before it counts, and has made some of them"
    return Recovery.LIVE, "the gradients of the next step were being reduced"


class StepCounter:
    """The version of a state, and the steps that its optimizers have made since the last resume point.

    Args:
        report: A function to call with each new version.
    """

    def __init__(self, report: Callable[[StateVersion], None]) -> None:
        self.version: StateVersion | None = None
        """None before the state was first synchronised."""
        self.saved_version: StateVersion | None = None
        """The version that `restore` returns to."""
        self.steps: dict[str, int] = {}
        """Steps since the last resume point, by the name of the optimizer."""
        self.in_loop = False
        """True inside of `elastic.run`."""
        self.alone = False
        """True while reset callbacks run, whose steps and commits are not counted."""
        self._report = report

    def set(self, version: StateVersion) -> None:
        self.version = version
        self._report(version)

    def advance(self, steps: int = 1) -> None:
        if self.version is not None and not self.alone:
            self.set(self.version.stepped(steps))

    def mark(self) -> None:
        """Count a resume point in the version."""
        if self.version is not None:
            self.set(self.version.marked())

    def stepped(self, optimizer: str) -> None:
        self.steps[optimizer] += 1
        self.advance()

    def reset_steps(self) -> None:
        for name in self.steps:
            self.steps[name] = 0


class LoopWatch:
    """Observes how a loop changes the state around its steps, so that the changes of a failed step can be undone.

    This base class observes nothing. It is for loops, such as those of the estimators, in which only optimizers change
    tensors and all plain values change after the step. Subclasses observe the loops of users.
    """

    def __init__(self, handlers: Handlers, counter: StepCounter) -> None:
        self.log = UndoLog()
        self._handlers = handlers
        self._counter = counter

    def begin(self) -> None:
        """Start observing: the loop's function is about to be called, or is at a resume point before its first step."""

    def end(self) -> None:
        """Stop observing the loop."""
        self.log.end()

    def entering(self, optimizer: str) -> None:
        """Record that an optimizer has received the reduced gradients of a step."""

    def resume_point(self, committed: bool) -> None:
        """Record the present tensors at a resume point; `committed`: `save` has just copied them."""

    def altered(self, stepped: bool) -> bool:
        """Return `Failure.altered`; `stepped`: steps were applied since the last resume point."""
        return False

    def amid(self, error: HorovodInternalError) -> bool:
        """Return `Failure.amid`."""
        return False

    def undone(self) -> dict[str, Any] | None:
        """Return the values, by name, to set before the failed step is made again; None if they are unknown."""
        return self.log.undone(self.value_of)

    def value_of(self, name: str) -> Any:
        return getattr(self._handlers.owner, name)

    def restore_values(self, values: Mapping[str, Any]) -> None:
        self._handlers.plain.assign(values)


class OptimizerSteps:
    """Counts the steps of a state's optimizers, and undoes an unfinished step; a method does nothing by default.

    This base class is for optimizers whose owner calls `StepCounter.stepped` itself.
    """

    def __init__(self, handlers: Handlers, counter: StepCounter, watch: LoopWatch) -> None:
        self._handlers = handlers
        self._counter = counter
        self._watch = watch

    # --- the values ---------------------------------------------------------------------------------

    def attach(self, name: str) -> None:
        """Count the steps of a value that is new in the state, if it is an optimizer."""

    def before_save(self) -> None:
        """Prepare the values for being copied."""

    def before_sync(self) -> None:
        """Prepare the values for being taken over from another member."""

    def values_replaced(self) -> None:
        """Forget counts and copies that belong to values which have just been replaced in all optimizers."""

    # --- steps --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Count the steps that were made since the last call, if optimizers do not report them."""

    def may_mark(self) -> bool:
        """Return True if training can resume from here, not in the middle of a step; the same on every member."""
        return True

    def may_leave(self) -> bool:
        """Return True if the loop can be left here without losing work; the same on every member."""
        return True

    def since_resume_point(self) -> list[int]:
        """Return the number of steps since the last resume point, for each optimizer that trains something."""
        return list(self._counter.steps.values())

    def resume_point(self, called: bool) -> None:
        """Copy what steps change besides through optimizers, such as running means, seeds, metrics and rows done.

        Args:
            called: The loop's function is about to be called.
        """

    # --- a step that failed -------------------------------------------------------------------------

    def function_left(self) -> None:
        """Handle the end of the loop's function by an error, before any value is put back."""

    def undo_step(self, choice: Recovery) -> None:
        """Put back what the unfinished step has changed and the recovery by `choice` has not."""

    def drop_unfinished(self) -> None:
        """Drop the gradients of the unfinished step: a loop that zeroes them after a step would add to them."""

    # --- the loop -----------------------------------------------------------------------------------

    def before_joining(self) -> None:
        """Do in advance what takes long in a newcomer's first step, see `State._before_joining`."""

    def loop_over(self) -> None:
        """Detach from optimizers and models: the loop has returned or raised."""

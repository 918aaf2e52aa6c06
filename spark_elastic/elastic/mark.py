"""The mark: the point from which training resumes after a loss, if nothing has changed since.

A mark is a commit, a check for updated hosts, or a call of the loop's function. After a failed collective the tensors
stay as they are, and the plain values of the last mark are set, if no optimizer has begun a step since, no parameter
has been written to, and no handler of the user's holds tensors. Otherwise tensors and plain values return to the last
commit together. `OptimizerSteps` is the part of this that depends on the framework.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from spark_elastic.collective.operators import Max
from spark_elastic.collective.process import process
from spark_elastic.collective.replicas import check_equal
from spark_elastic.elastic.handlers import Handlers
from spark_elastic.errors import UsageError
from spark_elastic.membership.topology import StateVersion

running_loop: ContextVar[StepCounter | None] = ContextVar("running_loop", default=None)
"""The counter of the state whose loop is running in this thread."""


class StepCounter:
    """The version of a state, which is passed to `report`, and the steps of its optimizers since the last mark."""

    def __init__(self, report: Callable[[StateVersion], None]) -> None:
        self.version: StateVersion | None = None
        """None before the state was first synchronised."""
        self.saved_version: StateVersion | None = None
        """The version that `restore` returns to."""
        self.steps: dict[str, int] = {}
        """Steps since the last mark, by the name of the optimizer."""
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
        """Count a mark in the version."""
        if self.version is not None:
            self.set(self.version.marked())

    def stepped(self, optimizer: str) -> None:
        self.steps[optimizer] += 1
        self.advance()


class OptimizerSteps:
    """Six hooks by which a framework observes the optimizers of a state.

    This base class is for optimizers whose owner calls `StepCounter.stepped` after each step, and whose unfinished
    steps change nothing.
    """

    def __init__(self, handlers: Handlers, counter: StepCounter) -> None:
        self._handlers = handlers
        self._counter = counter
        self.refused = 0
        """The number of marks in a row that came in the middle of a step; of steps that were not left out."""
        self._compared_in: Callable[[], Any] = lambda: None
        """Returns the group in which the members' models were compared."""

    def attach(self, name: str) -> None:
        """Count the steps of a value that is new in the state, if it is an optimizer."""

    def count(self, replaced: bool = False) -> None:
        """Count the steps since the last call, if optimizers do not report them.

        `replaced`: the values of all optimizers have just been replaced, so their steps until now do not count.
        """

    def check(self) -> None:
        """Refuse a mark of a loop whose training the state cannot keep, by UsageError or MismatchError; all call it."""

    def refuse_outsider(self, optimizer: Any, kind: str = "a DistributedOptimizer") -> None:
        """Raise UsageError, because this optimizer has made steps and is not in the state."""
        state = type(self._handlers.owner).__name__
        raise UsageError(
            f"{kind} ({type(optimizer).__name__}) trains in the loop and is not in its state, so other workers would "
            f"not know what it has learnt. Give it to the state, as in {state}(model=model, optimizer=optimizer); if "
            "it is within another optimizer, give that one instead"
        )

    def compare_models(self, begun: bool, tensors: Callable[[], Mapping[str, torch.Tensor]], remedy: str) -> None:
        """Compare the members' models at the first mark of a world that follows a step; all members call this.

        `begun`: this member's models have made a step. `tensors` returns the parameters by name. Raises MismatchError,
        with the sentence `remedy`, if they differ, and HorovodInternalError if a peer is gone.
        """
        group = process.group()
        if group is None or group is self._compared_in():
            return
        all_begun = torch.tensor([-int(begun)], device="cpu")
        group.wait(group.allreduce(all_begun, Max.gloo))
        if all_begun.item():
            self._compared_in = weakref.ref(group)
            check_equal(group, tensors(), remedy)

    def passes_begun(self) -> int:
        """Return the number of passes of a step that is between its first gradient and its end; 0 between two steps."""
        return 0

    def mark(self) -> None:
        """Remember the parameters' counters of changes, and copy what steps change besides: running means, seeds."""

    def undo(self, plain: dict[str, Any]) -> str:
        """Drop the gradients of an unfinished step and, if no step has begun since the mark, put back its copies.

        Returns a phrase that says what has changed since the mark; "" if nothing has. The state will return to the
        mark's `plain` values: a framework whose steps are finer than the marks advances the counters among them.
        """
        if not self._counter.steps:
            return "no optimizer in the state says when the model changes"
        return "an optimizer has made a step since the last mark" if any(self._counter.steps.values()) else ""

"""Decide which state to resume from after a failed collective: a pure function of facts about the failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


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
    """A collective that failed inside the elastic loop.

    Attributes:
        steps: For each optimizer in the state, the steps it has applied since the last resume point (a commit, a check
            for updated hosts, or the entry of the loop).
        in_reduction: The failed collective was the gradient reduction of a `DistributedOptimizer`.
        mid_update: An optimizer had begun to change parameters and did not finish.
        committed: The last resume point was a commit, so there is a copy of the tensors as they were then.
        altered: Something else than the optimizers has changed tensors since the last resume point; or, once steps
            were applied, the loop does that before its first step, so that a part of the next step is done already.
        amid: The loop makes several steps before it counts, and may stand between two of them.
    """

    steps: Sequence[int]
    in_reduction: bool
    mid_update: bool = False
    committed: bool = False
    altered: bool = False
    amid: bool = False


def decide(failure: Failure) -> tuple[Recovery, str]:
    """Return the state to resume from, and the reason as a sentence.

    Without an optimizer nothing tells when the model changes, so only the commit is safe. With several optimizers, the
    entry of a step is a boundary of the whole loop only if all have applied equally many steps.
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
        return (
            Recovery.COMMIT,
            f"the optimizers have made unequal numbers of steps, {list(failure.steps)}",
        )
    if failure.amid:
        return Recovery.COMMIT, "the loop makes several steps before it counts, and has made some of them"
    return Recovery.LIVE, "the gradients of the next step were being reduced"

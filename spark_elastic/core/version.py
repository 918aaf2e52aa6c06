"""How far a worker's state is: more than its number of steps, because a state changes without one as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class StateVersion:
    """A point in a worker's training; versions are ordered, and the larger one is the more advanced.

    All workers go through the same points in the same order, so the most advanced has everything that the others have.
    None in place of a version: the worker holds no state.

    loop: number of the elastic loop within the user's function, 1 for the first. steps: optimizer steps applied in
    this loop; commits, if the state has no optimizer. marks: resume points (commits, checks for updated hosts, turns)
    since the last step, or since the loop began. A commit without a step may follow a schedule's step, a new epoch or
    a step that a gradient scaler skipped.

    Raises: ValueError: a number is out of range.
    """

    loop: int = 1
    steps: int = 0
    marks: int = 0

    def __post_init__(self) -> None:
        if self.loop < 1 or self.steps < 0 or self.marks < 0:
            raise ValueError(f"a version needs loop >= 1, steps >= 0 and marks >= 0, not {self}")

    def __str__(self) -> str:
        loop = "" if self.loop == 1 else f"loop {self.loop} "
        marks = "" if self.marks == 0 else f"+{self.marks}"
        return f"{loop}step {self.steps}{marks}"

    @property
    def trained(self) -> bool:
        """Whether any step was applied, in this loop or in one before."""
        return self.steps > 0 or self.loop > 1

    def stepped(self, steps: int = 1) -> StateVersion:
        """Return the version after that many steps."""
        return StateVersion(self.loop, self.steps + steps)

    def marked(self) -> StateVersion:
        """Return the version after one more resume point."""
        return StateVersion(self.loop, self.steps, self.marks + 1)

    def is_steps_after(self, other: StateVersion) -> bool:
        """Whether a step was applied since `other`, or a later loop was entered."""
        return (self.loop, self.steps) > (other.loop, other.steps)

    def steps_lost(self, furthest: StateVersion) -> int:
        """Count the steps that were applied on the way to `furthest` and are not part of this version."""
        if furthest.loop == self.loop:
            return max(0, furthest.steps - self.steps)
        return furthest.steps if furthest.loop > self.loop else 0


BEGINNING = StateVersion()

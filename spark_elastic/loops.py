"""The elastic loops of this process: their numbers, and what those that are over have left behind.

When a world breaks after a loop, the user's function is called again in the same process. Up to the loop it does its
work anew; at the loop it takes up the state and the result that are kept here, and what comes after is done again.
`task.worker` calls the function, `state.elastic_loop` enters and finishes the loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FinishedLoop:
    """state: as the loop has left it, saved; None: this process was not in the loop and has only its result."""

    state: Any
    result: Any


class Loops:
    """Loops are numbered from 1 in the order in which one call of the user's function enters them."""

    def __init__(self) -> None:
        self.entered = 0
        """The newest loop that this call of the function has entered; 0: none."""
        self._finished: list[FinishedLoop] = []
        self._has_joined = True
        self.on_run_again: Callable[[], None] | None = None
        """Set by the frontend: leave the world, and do without one until a loop is entered."""

    def enter(self) -> int:
        """Return the number of the loop that is entered now."""
        self.entered += 1
        return self.entered

    def kept(self, number: int) -> FinishedLoop | None:
        """What the loop has left behind in an earlier call of the function; None: it was not finished in one."""
        return self._finished[number - 1] if number <= len(self._finished) else None

    @property
    def last(self) -> int:
        """The newest loop that was finished here; 0: none."""
        return len(self._finished)

    @property
    def unbroken(self) -> bool:
        """Whether this process was in every loop that is behind it; what it builds rests on their states then."""
        return all(loop.state is not None for loop in self._finished)

    def finish(self, number: int, state: Any, result: Any) -> None:
        """Keep what the loop has come to."""
        self._finished[number - 1 :] = [FinishedLoop(state, result)]

    def joined(self) -> None:
        """This process is a member of a world."""
        self._has_joined = True

    @property
    def waits_for_loop(self) -> bool:
        """Whether the function was called again and has not come to a world since."""
        return not self._has_joined

    @property
    def can_run_again(self) -> bool:
        """Whether the function can be called again here: a loop is finished, and the last call came to one."""
        return bool(self._finished) and self._has_joined

    def run_again(self) -> None:
        """The function is about to be called again."""
        self.entered = 0
        self._has_joined = False
        if self.on_run_again is not None:
            self.on_run_again()


loops = Loops()
"""Those of this process."""

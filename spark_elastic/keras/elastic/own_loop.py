"""A loop of the user's own: where its steps begin, as told by the reductions of gradients.

Inside of a `tf.function` Python is not called when an optimizer steps, but each reduction of gradients comes through
this process. Whether steps were applied since the one before is read from the optimizers then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_elastic.collective import fused
from spark_elastic.core.plain_values import PlainValues, same


class OwnLoop:
    """Tells `follow` of the entries of steps while a loop runs that is not one of `fit` with callbacks of ours.

    Args:
        follow: follows the plain values of the state.
        steps: gives the steps that each optimizer of the state has applied.
        values: gives copies of the plain values by name.
    """

    def __init__(
        self, follow: PlainValues, steps: Callable[[], tuple[int, ...]], values: Callable[[], dict[str, Any]]
    ) -> None:
        self.watching = False
        self.counts_rarely = False
        """Whether all plain values were the same at the first two steps: the loop makes several before it counts."""
        self._follow = follow
        self._steps = steps
        self._values = values
        self._entered: tuple[int, ...] | None = None
        """Steps applied when the last one was entered; None: none was, since the loop was called."""
        self._at_first_entry: dict[str, Any] | None = None
        self._compared = False

    def begin(self) -> None:
        """The function of the loop is about to be called."""
        self.end()
        self.watching = True
        self._entered, self._at_first_entry, self._compared = None, None, False
        self._follow.begin(self._values())
        fused.on_reduction.append(self._reduction_begins)

    def end(self) -> None:
        if self.watching:
            self.watching = False
            self._follow.end()
            fused.on_reduction.remove(self._reduction_begins)

    def _reduction_begins(self) -> None:
        steps = self._steps()
        if steps == self._entered:
            return  # of a second tape, say, in the same step
        if self._entered is not None:
            self._follow.stepped_meanwhile()
        self._entered = steps
        values = self._values()
        self._follow.entering(values.__getitem__)
        if not self._compared and len(set(steps)) == 1:  # not between the steps of several optimizers
            if self._at_first_entry is None:
                self._at_first_entry = values
            else:
                self._compared = True
                self.counts_rarely |= bool(values) and same(self._at_first_entry, values)

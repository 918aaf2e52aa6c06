"""A loop of the user's own: where its steps begin, as told by the reductions of gradients.

Inside of a `tf.function` Python is not called when an optimizer steps, but each reduction of gradients comes through
this process. Whether steps were applied since the one before is read from the optimizers then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_elastic.collective import fused
from spark_elastic.elastic.plain_values import PlainValues, same


class OwnLoop:
    """Tell `follow` where steps begin, while a loop runs that is no `fit` with callbacks of this package.

    Args:
        follow: follows the plain values of the state.
        steps: gives the steps that each optimizer of the state has applied.
        values: gives copies of the plain values by name.
        entering: called when the gradients of a step have arrived, before they are reduced.
    """

    def __init__(
        self,
        follow: PlainValues,
        steps: Callable[[], tuple[int, ...]],
        values: Callable[[], dict[str, Any]],
        entering: Callable[[], None],
    ) -> None:
        self.watching = False
        self._counts_rarely = False
        """Whether all plain values were the same at the first two steps: the loop makes several before it counts."""
        self._follow = follow
        self._steps = steps
        self._values = values
        self._entering = entering
        self._entered: tuple[int, ...] | None = None
        """Steps applied when the last one was entered; None: none was, since the loop was called."""
        self._first: tuple[tuple[int, ...], dict[str, Any]] | None = None
        """Steps applied and plain values when the first step was entered, since the loop was called."""
        self._not_counted = False
        """Whether all plain values still are what they were then, as far as it is known: several optimizers may step
        before a loop counts."""
        self._compared = False

    @property
    def counts_rarely(self) -> bool:
        return self._counts_rarely or self._not_counted

    def begin(self) -> None:
        """The function of the loop is about to be called."""
        self.end()
        self.watching = True
        self._entered, self._first, self._not_counted, self._compared = None, None, False, False
        self._follow.begin(self._values())
        fused.on_reduction.append(self._reduction_begins)

    def end(self) -> None:
        if self.watching:
            self.watching = False
            self._follow.end()
            fused.on_reduction.remove(self._reduction_begins)

    def _reduction_begins(self) -> None:
        self._entering()
        steps = self._steps()
        if steps == self._entered:
            return  # of a second tape, say, in the same step
        if self._entered is not None:
            self._follow.stepped_meanwhile()
        self._entered = steps
        values = self._values()
        self._follow.entering(values.__getitem__)
        if not self._compared:
            self._compare(steps, values)

    def _compare(self, steps: tuple[int, ...], values: dict[str, Any]) -> None:
        """Find out whether the loop counts between two of its steps, each of which all optimizers that are used make.

        One that does not step while another one steps twice is not used.
        """
        if self._first is None:
            self._first = steps, values
            return
        since = [now - then for now, then in zip(steps, self._first[0], strict=True)]
        others_idle = max(since) > 1
        if not others_idle:
            self._not_counted = bool(values) and same(self._first[1], values)
        if others_idle or len(set(since)) == 1:
            self._compared = True
            self._counts_rarely |= self._not_counted
            self._not_counted = False

"""The ranks' shares of each global batch, and a `Balancer` that makes them follow the ranks' speeds.

Shares are a list with the rows of each rank in a full batch; None: equal ones, which differ by at most one row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

Shares = Sequence[int] | None

_WINDOW, _NEWEST = 12, 4
"""The steps whose times are kept, and the newest of them."""
_HYSTERESIS = 0.1
"""Shares change if steps get faster by this; equal ones are preferred if they are not slower than the best by this."""
_AT_ONCE = 0.25
"""A gain that is acted on after a few steps: noise does not come to this."""
_BACK = 0.02
"""The gain from which equal shares replace others."""
_SIZES = 32
"""Shares are multiples of an equal share divided by this: few sizes, because each may have to be traced or compiled."""
_OUTLIER = 1.5
"""A time counts as at most this many medians."""
_SKIPPED = 2
"""The steps whose times do not count after a change: of the old shares, and of rows that were not read ahead."""


def part_of(rank: int, size: int, shares: Shares) -> tuple[int, int, int]:
    """Return `first`, `last` and `whole`: the rank has what is from first / whole to last / whole of each batch."""
    if shares is None:
        return rank, rank + 1, size
    first = sum(shares[:rank])
    return first, first + shares[rank], sum(shares)


def most_rows(rows: int, size: int, shares: Shares) -> int:
    """Return the rows of the largest part of a batch of `rows` rows."""
    if shares is None:
        return -(-rows // size)
    whole = sum(shares)
    edges = [rows * first // whole for first in accumulate(shares, initial=0)]
    return max(last - first for first, last in pairwise(edges))


def equal_shares(rows: int, size: int) -> list[int]:
    return [rows * (rank + 1) // size - rows * rank // size for rank in range(size)]


class Change(NamedTuple):
    """New shares; the rank that needs the longest for a row, and how many times as long as the median rank."""

    shares: list[int]
    slowest: int
    slowness: float

    def __str__(self) -> str:
        percent = [100 * share / sum(self.shares) for share in self.shares]
        if max(self.shares) - min(self.shares) <= 1:
            return f"the workers are about equally fast: each takes {percent[0]:.0f} % of a batch again"
        return (
            f"rank {self.slowest} works {self.slowness:.1f} times as long for a row as the others: it takes "
            f"{percent[self.slowest]:.0f} % of each batch now, and the largest share is {max(percent):.0f} %"
        )


class Balancer:
    """Decides the shares of a global batch from the times of the ranks' steps; the same on all of them.

    All ranks feed it the same numbers after each step, so no message announces a change. It calculates without numpy,
    whose sums may differ between processors.

    Args:
        size: The number of ranks.
        rows: The rows of a full batch.
        least: The smallest share.
    """

    def __init__(self, size: int, rows: int, least: int = 1) -> None:
        self._rows = rows
        self._least = least
        self._equal = self._present = equal_shares(rows, size)
        self._most = [rows] * size
        self._can = size > 1 and rows > size * least  # otherwise all shares are the smallest
        self._window: deque[list[float]] = deque(maxlen=_WINDOW)
        self._skipped = 0

    @property
    def shares(self) -> Shares:
        return None if self._present == self._equal else self._present

    def observe(self, seconds: Sequence[float], most: Sequence[float] = ()) -> Change | None:
        """Note how long each rank has worked in a step of a full batch; return the shares if they have changed.

        A rank that does not know its time gives 0, and the step does not count. `most` limits the share of each rank,
        unless it is 0 or less than an equal one.
        """
        for rank, limit in enumerate(most):
            self._most[rank] = max(int(limit), self._equal[rank]) if limit else self._rows
        if not self._can or len(seconds) < len(self._equal) or not all(0 < each < math.inf for each in seconds):
            return None
        if self._skipped < _SKIPPED:
            self._skipped += 1
            return None
        self._window.append([each / rows for each, rows in zip(seconds, self._present, strict=True)])
        better = self._better_now()
        if better is None:
            return None
        times = _means(list(self._window)[-_NEWEST:])
        slowest = max(range(len(times)), key=times.__getitem__)
        self._present = better
        self._window.clear()
        self._skipped = 0
        return Change(better, slowest, times[slowest] / sorted(times)[(len(times) - 1) // 2])

    def _better_now(self) -> list[int] | None:
        """Return shares that a change to is worth it by the times so far, or None."""
        count = len(self._window)
        if count < _NEWEST:
            return None
        window = list(self._window)
        few = window[-_NEWEST:]
        newest = _means(few)
        if self._better(newest, _HYSTERESIS, _BACK) is None:
            return None
        if all(self._better(each, _HYSTERESIS, _HYSTERESIS) for each in few):
            at_once = self._better(newest, _AT_ONCE, _AT_ONCE)
            if at_once is not None:
                return at_once
        if count < _WINDOW or self._better(_means(window[:-_NEWEST]), _HYSTERESIS, _BACK) is None:
            return None
        return self._better(_means(window[_NEWEST:]), _HYSTERESIS, _BACK)

    def _better(self, times: Sequence[float], gain: float, back: float) -> list[int] | None:
        """Return new shares if they make a step faster by `gain` (equal shares: by `back`), else None.

        `times` are the seconds that each rank needs for a row.
        """
        now, even = _longest(self._present, times), _longest(self._equal, times)
        best = self._rows / math.fsum(1 / each for each in times)
        if even <= (1 + _HYSTERESIS) * best:
            return self._equal if self._present != self._equal and now >= (1 + back) * even else None
        if now < (1 + gain) * best:
            return None
        dealt = self._dealt(_grouped(times, 1 + gain))
        return dealt if now >= (1 + gain) * _longest(dealt, times) else None

    def _dealt(self, times: Sequence[float]) -> list[int]:
        """Return the shares with which all ranks need about equally long."""
        least, most, unit = self._least, self._most, max(1, self._rows // (_SIZES * len(times)))
        speed = math.fsum(1 / each for each in times)
        shares = [max(least, unit * round(self._rows / (each * speed) / unit)) for each in times]
        shares = [min(share, limit) for share, limit in zip(shares, most, strict=True)]
        ranks = range(len(times))
        while (left := self._rows - sum(shares)) > 0:
            room = [rank for rank in ranks if shares[rank] < most[rank]]
            rank = min(room, key=lambda rank: (shares[rank] + unit) * times[rank])
            shares[rank] += min(unit, left, most[rank] - shares[rank])
        while (over := sum(shares) - self._rows) > 0:
            spare = [rank for rank in ranks if shares[rank] > least]
            rank = max(spare, key=lambda rank: shares[rank] * times[rank])
            shares[rank] -= min(unit, over, shares[rank] - least)
        return shares


def _means(steps: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each rank's times; much longer ones than the median count less, as of a step that compiles."""
    means = []
    for times in zip(*steps, strict=True):
        most = _OUTLIER * sorted(times)[len(times) // 2]
        means.append(math.fsum(min(each, most) for each in times) / len(times))
    return means


def _grouped(times: Sequence[float], most: float) -> list[float]:
    """Return the mean in place of times that differ by less than a factor, so that shares have few sizes."""
    grouped = list(times)
    ranks = sorted(range(len(times)), key=times.__getitem__)
    while ranks:
        group = [rank for rank in ranks if times[rank] <= most * times[ranks[0]]]
        mean = math.fsum(times[rank] for rank in group) / len(group)
        for rank in group:
            grouped[rank] = mean
        ranks = ranks[len(group) :]
    return grouped


def _longest(shares: Sequence[int], times: Sequence[float]) -> float:
    return max(rows * each for rows, each in zip(shares, times, strict=True))

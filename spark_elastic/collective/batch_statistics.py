"""Sums over the rows of all members within a pass, for synchronised batch normalisation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spark_elastic.collective.group import Group
from spark_elastic.collective.operators import Sum
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet

_without_rows = False
sums_in_backward: weakref.WeakSet[Any] = weakref.WeakSet()
"""The forward passes whose backward passes have still to sum over the members.

Until then no gradients are sent: a member without some of them sends at another moment, and the order would differ.
"""


@contextmanager
def without_rows() -> Iterator[None]:
    """Let the passes in this context take part in the others' statistics without adding rows to them.

    A rank that has no rows of a batch uses it: it calls the model on a substitute row, forward and backward, to take
    part in as many collectives as the others. Such passes come before those with rows, and leave no gradients.
    """
    global _without_rows
    before, _without_rows = _without_rows, True
    try:
        yield
    finally:
        _without_rows = before


def is_without_rows() -> bool:
    """Return True within `without_rows`: the rows of this process must not be counted."""
    return _without_rows


def sum_rows(numbers: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    """Return `sum_over_group` of a copy of `numbers`, for the group of the set; within `without_rows`, add zeros."""
    sums = numbers.detach().clone()
    if _without_rows:
        sums.zero_()
    group = normalised_group(process_set)
    return sums if group is None else sum_over_group(group, sums)


def normalised_group(process_set: ProcessSet) -> Group | None:
    """Return the group whose rows are normalised together; None if this process is alone or in no world."""
    if process.position is None or process.provisional:
        return None
    return process_set.group()


def sum_over_group(group: Group, numbers: torch.Tensor) -> torch.Tensor:
    """Sum `numbers`, float64, over the members, in place; return them. Raise HorovodInternalError if a peer is gone."""
    group.wait(group.allreduce(numbers, Sum.gloo))
    return numbers

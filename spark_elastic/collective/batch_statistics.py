"""Sums over the rows of all members within a forward or backward pass: what synchronised batch normalisation needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet
from spark_elastic.collective.reduction import Sum
from spark_elastic.errors import HorovodInternalError

_excluded = False


@contextmanager
def without_rows() -> Iterator[None]:
    """While this lasts, passes of this process take part in the others' statistics without adding to them.

    For a rank that has no rows of a batch: it calls the model on a row that stands in, so that it takes part in as many
    collectives as the others.
    """
    global _excluded
    before, _excluded = _excluded, True
    try:
        yield
    finally:
        _excluded = before


def excluded() -> bool:
    """Whether rows of this process do not count now, see `without_rows`."""
    return _excluded


def group_of(process_set: ProcessSet) -> GlooGroup | None:
    """Return the group whose rows count together; None: this process is alone, or its world is not known yet."""
    if process.position is None or process.provisional:
        return None
    return process_set.group()


def add_up(group: GlooGroup, numbers: torch.Tensor) -> torch.Tensor:
    """Add up `numbers`, float64, over the members, in place.

    Raises:
        HorovodInternalError: a peer is gone. It counts as a failed reduction of gradients: the step that this pass
            belongs to has not changed any parameter.
    """
    try:
        group.wait(group.allreduce(numbers, Sum.gloo))
    except HorovodInternalError as error:
        error.in_reduction = True  # type: ignore[attr-defined]
        raise
    return numbers

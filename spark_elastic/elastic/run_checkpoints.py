"""Durable checkpoints of elastic loops: rank 0 writes commits in the background; a later job resumes from them.

`jobs.run_folder` opens the run's folder on the driver and sends a `RunCheckpoints` to the workers with their function.
Each loop of the function has checkpoints of its own, see `folder_of`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from spark_elastic import clock
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError
from spark_elastic.runs.checkpoints import (
    CHECKPOINTS,
    CheckpointFacts,
    Checkpoints,
    CheckpointWriter,
    Contents,
    name_of,
)
from spark_elastic.runs.lease import Fence
from spark_elastic.runs.tensors import check_exact, detached, from_bytes, to_bytes
from spark_elastic.wire.worker_link import notify

if TYPE_CHECKING:
    from spark_elastic.elastic.state import State

log = logging.getLogger("spark_elastic.elastic.checkpoints")

COMMIT_INTERVAL_S = 10.0
"""Shortest time between two commits that are written; the end of a loop is written in any case."""
KEEP = 3
"""The number of the newest checkpoints of a loop that are kept."""
END_TIMEOUT_S = 60.0
"""How long the end of a loop waits until its state is written."""
_STATE = "state.pt"
_ARRAY = "numpy.ndarray"
"""The key of an array of NumPy, which is written as a tensor."""
_MARKS = 1000
"""Of the commits between two steps, the most that the names of their checkpoints distinguish."""


def folder_of(run: Store, loop: int) -> Store:
    """Return the folder of the checkpoints of an elastic loop of the function, which are numbered from 1."""
    return run.sub(CHECKPOINTS if loop == 1 else f"{CHECKPOINTS}-{loop}")


class RunCheckpoints:
    """The checkpoints of a run, in a worker. Pickled on the driver.

    Before rank 0 writes, it checks by `fence` that its driver still holds the run. `resume` has the checkpoint that
    each loop resumes from, by the loop's number. Commits are written `interval_s` seconds apart at least.
    """

    def __init__(
        self, fence: Fence, resume: Mapping[int, CheckpointFacts], interval_s: float = COMMIT_INTERVAL_S
    ) -> None:
        self.interval_s = interval_s
        self._fence = fence
        self._resume = resume
        self._loop = 0
        self._writer: CheckpointWriter | None = None
        self._next_at = 0.0

    def start_loop(self, state: State) -> None:
        """Begin a loop. Raises UsageError, which names the value, if the state cannot be written."""
        try:
            detached(values_of(state)["light"], "state", copy=False)
        except CheckpointError as error:
            error.message += "; keep it as those, or in an object whose state_dict returns those"
            raise
        if self._writer is None or self._loop != state._loop:
            self._loop, self._next_at = state._loop, clock.monotonic()
            checkpoints = Checkpoints(folder_of(self._fence.run, self._loop), self._fence)
            self._writer = CheckpointWriter(checkpoints, KEEP, notify, patience_s=0.0)

    def load(self, state: State, is_root: bool) -> bool:
        """Give the state the values of the loop's checkpoint, on the root alone, whose values the others take over.

        Returns True, on every member alike, if there is one. Raises CheckpointError if it cannot be used.
        """
        point = self._resume.get(state._loop)
        if point is None:
            return False
        if is_root:
            folder = folder_of(self._fence.run, state._loop)
            try:
                state._set_values(restored(from_bytes(Checkpoints(folder).load(point.name).files[_STATE])))
            except CheckpointError:
                raise
            except (KeyError, ValueError, RuntimeError, TypeError) as error:
                raise CheckpointError(
                    f"checkpoint {point.name} in {folder} is of another state: {error}; build the state as it was "
                    "when it was written, or choose another run_id"
                ) from error
            log.info("resuming from step %d in %s", point.step, folder)
        return True

    def write(self, state: State, rank: int, *, end: bool = False) -> None:
        """Write the state on rank 0, in the background; at the `end` of the loop, wait until it is written."""
        writer, version = self._writer, state.version
        if rank != 0 or writer is None or version is None:
            return
        if writer.fenced is not None:
            raise writer.fenced  # a RunTakenError: another driver has taken over the run
        writer.watch()
        now = clock.monotonic()
        if now < self._next_at and not end:
            return
        self._next_at = now + self.interval_s
        resumed, token = self._resume.get(state._loop), self._fence.token
        step = version.steps + (resumed.step if resumed else 0)
        name = name_of(version.steps * _MARKS + min(version.marks, _MARKS - 1), token)
        facts = CheckpointFacts(name, step, epoch=0, position=0, token=token)
        try:
            values = detached(values_of(state), "state")
        except CheckpointError as error:  # a value has changed its type; the writer says so, and training continues
            values = error

        def contents() -> Contents:
            if isinstance(values, CheckpointError):
                raise values
            return Contents(facts, {}, {_STATE: to_bytes(values)})

        writer.submit(contents, step)
        if end:
            try:
                writer.drain(END_TIMEOUT_S)
            except CheckpointError as error:  # the function has what it came for
                notify(f"the end of the loop is not among the checkpoints: {error}")
            writer.close()
            self._writer = None


def values_of(state: State) -> dict[str, Any]:
    """Return the values of a state, with tensors in place of arrays of NumPy.

    Raises UsageError as `State._values`, and CheckpointError, which names a plain value that would not come back equal.
    """
    values = state._values()
    for name in values["light"].keys() - values.get("tensors", {}).keys():
        try:
            check_exact(values["light"][name], f"state.{name}")
        except RecursionError:
            raise CheckpointError(f"state.{name} contains itself, or too many values within one another") from None
    with_tensors: dict[str, Any] = tree_map(_as_tensor, values)
    return with_tensors


def restored(values: Any) -> Any:
    """Return the values of a state from what `values_of` has returned."""
    return tree_map(lambda each: each[_ARRAY].numpy() if _is_array(each) else each, values, is_leaf=_is_array)


def _as_tensor(value: Any) -> Any:
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return {_ARRAY: torch.from_numpy(value.copy())} if is_array else value


def _is_array(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_ARRAY}

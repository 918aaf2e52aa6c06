"""The end of elastic loops: several loops in a function, and what follows them, which may be run again.

When a world breaks after a loop, the user's function is called again in the same process (`task.main`). Its finished
loops are then skipped: `loops` keeps the state and the result of each. The new state object of the last one takes up
the values of the old one and joins the next world, and what follows is run again. A newcomer that finds the job in a
later loop skips the earlier ones too. It gets their results, which rank 0 has sent to the driver.
"""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from spark_elastic.collective.objects import sign, verify
from spark_elastic.collective.process import Process, process
from spark_elastic.errors import LoopResultError
from spark_elastic.membership.topology import StateVersion

if TYPE_CHECKING:
    from spark_elastic.elastic.state import State

log = logging.getLogger("spark_elastic.elastic.loop")

MAX_LOOP_RESULT_BYTES = 1 << 20
RESULT_TIMEOUT_S = 60.0
"""Time to wait for a result that another worker has sent to the driver."""
_PURPOSE = "results of loops"
"""The name from which the key of the MACs of results is derived."""


class LaterLoop(Exception):
    """Raised where a process enters a loop that the others have left; it uses the result of that loop instead."""


class FinishedLoop(NamedTuple):
    """The outcome of an elastic loop."""

    state: State | None
    """The state at the loop's end, saved; None if this process skipped the loop and has only its result."""
    result: Any
    """The loop's return value."""


class LoopHistory:
    """The elastic loops of this process, numbered from 1 in the order in which a call of the function enters them."""

    def __init__(self, owner: Process) -> None:
        self._process = owner
        self.entered = 0
        """The newest loop that this call of the function has entered; 0: none."""
        self._finished: list[FinishedLoop] = []

    def enter(self) -> int:
        """Enter the next loop, and return its number."""
        self.entered += 1
        self._process.in_loop = self.entered > len(self._finished)
        return self.entered

    def kept(self, number: int) -> FinishedLoop | None:
        """Return the outcome of the loop in an earlier call of the function; None if it was not finished in one."""
        return self._finished[number - 1] if 0 < number <= len(self._finished) else None

    @property
    def last(self) -> int:
        """Number of the newest loop that was finished here; 0: none."""
        return len(self._finished)

    def version_before(self) -> StateVersion | None:
        """Return the version of the state that this process brings from the loop before; None if it skipped one."""
        before = self.kept(self.entered - 1)
        if before is None or before.state is None or any(loop.state is None for loop in self._finished):
            return None
        return before.state.version

    def finish(self, number: int, state: State | None, result: Any) -> None:
        """Keep the outcome of a loop."""
        self._finished[number - 1 :] = [FinishedLoop(state, result)]
        self._process.in_loop = False

    @property
    def can_run_again(self) -> bool:
        """True if the function can be called again: a loop is finished, and the last call joined a world."""
        return bool(self._finished) and not self._process.called_again

    def run_again(self) -> None:
        """Prepare for another call of the function."""
        self.entered = 0
        self._process.in_loop = False
        self._process.run_again()


loops = LoopHistory(process)
"""The loops of this process."""


# --- results, for newcomers to later loops --------------------------------------------------------------


def offer_result(loop: int) -> None:
    """On rank 0, give the driver the loop's result, which newcomers to later loops need."""
    link, kept = process.link, loops.kept(loop)
    if link is None or kept is None or process.require().rank != 0:
        return
    problem, data = "", b""
    try:
        data = cloudpickle.dumps(kept.result)
    except Exception as error:  # pickling runs the code of users' classes
        problem = f"it cannot be pickled ({type(error).__name__}: {error})"
    if len(data) > MAX_LOOP_RESULT_BYTES:
        problem = f"it is larger than {MAX_LOOP_RESULT_BYTES >> 20} MiB ({len(data):,} bytes)"
    if problem:
        log.warning(
            "workers that are lost in a later loop cannot be replaced: the result of loop %d cannot be sent to new "
            "ones, because %s",
            loop,
            problem,
        )
    link.offer_loop_result(loop, problem, b"" if problem else sign(_PURPOSE, str(loop), data))


def result_of(loop: int) -> Any:
    """Return the result that others had in a loop that is skipped here. Raise LoopResultError if it does not come."""
    link = process.link
    assert link is not None
    try:
        problem, answer = link.loop_result(loop, RESULT_TIMEOUT_S)
    except TimeoutError as error:
        raise LoopResultError(loop=loop, reason=str(error)) from None
    if problem:
        raise LoopResultError(loop=loop, reason=problem)
    return pickle.loads(verify(_PURPOSE, str(loop), answer, f"the result of loop {loop}"))

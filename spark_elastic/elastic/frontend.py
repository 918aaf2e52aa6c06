"""The elastic loop's access to this process's link and groups: leave a world, join the next, agree on when."""

from __future__ import annotations

import hashlib
import hmac
import logging
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from spark_elastic.collective.objects import broadcast_object
from spark_elastic.collective.operations import barrier
from spark_elastic.collective.process import process
from spark_elastic.collective.reduction import Max
from spark_elastic.errors import AuthenticationError, HorovodInternalError, LoopResultError
from spark_elastic.membership.topology import StateVersion
from spark_elastic.wire.worker_link import ProvisionalPosition, loops

log = logging.getLogger("spark_elastic.collective")

MAX_LOOP_RESULT_BYTES = 1 << 20
RESULT_TIMEOUT_S = 60.0
"""Time to wait for a result that another worker has sent on its own connection."""
_SEAL_BYTES = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """A member's entry into a world.

    Attributes:
        root: Rank of the member whose state everybody takes over.
        version: Version of that state; None if no member holds one yet.
        sync: False if all members report the same version.
        moved: Rank or size have changed.
        from_last_loop: All members have just come from the loop before, together. Until they share a state, a failure
            is recovered from by running the end of that loop again.
    """

    root: int
    version: StateVersion | None
    sync: bool
    moved: bool
    from_last_loop: bool = False


class SentOn(Exception):
    """The job is in a later loop than this: the function has to skip this one and use its result."""


class CollectiveFrontend:
    """The loop's and the states' access to this process's link and groups."""

    loops = loops

    def rank(self) -> int:
        return process.require().rank

    def broadcast_object(self, value: Any, root: int) -> Any:
        return broadcast_object(value, root)

    def alone(self) -> AbstractContextManager[None]:
        """Within it this member's collectives reach nobody, and return its own values."""
        return process.local_collectives()

    def agree_on_update(self) -> bool:
        """Return True if any member knows of a coming world; the same answer on every member.

        Free if gradients were reduced since the last check; otherwise one small reduction.
        """
        if process.link is None or process.provisional:
            return False
        agreed, process.update_agreed = process.update_agreed, None
        if agreed is not None:
            return agreed
        group = process.group()
        pending = process.update_pending
        if group is None:
            return pending
        token = torch.tensor([pending], dtype=torch.uint8)
        group.wait(group.allreduce(token, Max.gloo))
        return bool(token.item())

    def enter(self, prepare: Callable[[], None]) -> Entry:
        """Enter a loop; a newcomer waits here for its first world.

        Args:
            prepare: Called by a newcomer before it reports that it is ready; the others train meanwhile.

        Raises:
            HorovodInternalError: The world broke while it was being connected, or while all came from the loop before.
            SentOn: The job is in a later loop.
        """
        process.require()
        link = process.link
        if link is None:
            return Entry(root=0, version=None, sync=True, moved=False)
        if process.provisional:
            link.entered_loop()
            prepare()
            return self._rejoin(self._version_before(), moved=False)
        assert process.assignment is not None
        world = process.assignment.world
        process.group()  # raises, if the world broke meanwhile
        if loops.entered == 1:
            link.entered_loop()
            return Entry(root=world.root, version=world.version, sync=True, moved=False)
        self._offer_result(loops.entered - 1)
        barrier()  # no member enters while another may still be in the last collective of the loop before
        link.entered_loop()
        return Entry(root=0, version=None, sync=True, moved=False, from_last_loop=True)

    def _version_before(self) -> StateVersion | None:
        """Return the version of the state that this process brings from the loop before; None if it has none."""
        before = loops.kept(loops.entered - 1) if loops.entered > 1 and loops.unbroken else None
        return None if before is None else before.state.version

    def rejoin(self, version: StateVersion | None) -> Entry:
        """Leave the world that broke or is about to change, and wait until the next one is connected.

        Worlds that break meanwhile are left for the next.

        Args:
            version: Version of the state held here.

        Raises:
            SentOn: The job is in a later loop.
        """
        if process.link is None:
            return Entry(root=0, version=version, sync=False, moved=True)
        return self._rejoin(version, moved=True)

    def _rejoin(self, version: StateVersion | None, moved: bool) -> Entry:
        while True:
            round = process.assignment.world.round if process.assignment is not None else 0
            try:
                return self._join(round, version, moved)
            except HorovodInternalError as error:
                moved = True
                log.info("the next world broke before it was connected: %s", error)

    def finished(self, loop: int, state: Any, result: Any) -> None:
        """Keep state and result of a loop that has returned, in case the function has to be called again."""
        if process.link is not None:
            state.save()
            loops.finish(loop, state, result)
            process.link.left_loop()

    def _offer_result(self, loop: int) -> None:
        """Give the driver the loop's result, as rank 0: newcomers to later loops need it."""
        link, kept = process.link, loops.kept(loop)
        if link is None or kept is None or process.require().rank != 0:
            return
        problem, data = "", b""
        try:
            data = cloudpickle.dumps(kept.result)
        except Exception as error:  # pickling runs the code of users' classes
            problem = f"it cannot be pickled ({type(error).__name__}: {error})"
        if len(data) > MAX_LOOP_RESULT_BYTES:
            problem, data = f"it is larger than {MAX_LOOP_RESULT_BYTES >> 20} MiB ({len(data):,} bytes)", b""
        if problem:
            log.warning(
                "workers that are lost in a later loop cannot be replaced: the result of loop %d cannot be sent to new "
                "ones, because %s",
                loop,
                problem,
            )
        link.offer_loop_result(loop, problem, b"" if problem else _seal(loop, data) + data)

    def result_of(self, loop: int) -> Any:
        """Return the other members' result of a loop that this process skips.

        Raises:
            LoopResultError: There is none, or it did not arrive in time.
            AuthenticationError: It was not sent by a worker of this job.
        """
        assert process.link is not None
        try:
            problem, sealed = process.link.loop_result(loop, RESULT_TIMEOUT_S)
        except TimeoutError as error:
            raise LoopResultError(loop=loop, reason=str(error)) from None
        if problem:
            raise LoopResultError(loop=loop, reason=problem)
        seal, data = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, _seal(loop, data)):
            raise AuthenticationError(f"the result of loop {loop} does not carry this job's seal")
        return pickle.loads(data)

    def report_version(self, version: StateVersion) -> None:
        if process.link is not None:
            process.link.report_version(version)

    def _join(self, round: int, version: StateVersion | None, moved: bool) -> Entry:
        assert process.link is not None
        before = process.require()
        process.updates_handled = max(process.updates_handled, process.link.updates_seen())
        # closing the groups takes as long as the driver needs for the next world
        assignment = process.link.join(round, version, loops.entered, meanwhile=process.leave)
        if isinstance(assignment, ProvisionalPosition):
            process.leave_until_loop()
            raise SentOn()
        process.adopt(assignment)
        after = process.require()
        world = assignment.world
        changed = (before.rank, before.size) != (after.rank, after.size)
        return Entry(root=world.root, version=world.version, sync=world.sync, moved=moved or changed)


def _seal(loop: int, data: bytes) -> bytes:
    assert process.link is not None
    return hmac.digest(process.link.derive_key("results of loops"), f"{loop} ".encode() + data, hashlib.sha256)


frontend = CollectiveFrontend()

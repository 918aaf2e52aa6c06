"""This process's side of the elastic loop: leaving a world, joining the next, agreeing on when."""

from __future__ import annotations

import hashlib
import hmac
import logging
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import torch

from spark_elastic.collective.objects import broadcast_object
from spark_elastic.collective.operations import barrier
from spark_elastic.collective.process import process
from spark_elastic.collective.reduction import Max
from spark_elastic.elastic.state import Entry, SentOn, State
from spark_elastic.errors import AuthenticationError, HorovodInternalError, LoopResultError
from spark_elastic.membership.topology import StateVersion
from spark_elastic.wire.worker_link import ProvisionalPosition, loops

log = logging.getLogger("spark_elastic.collective")

MAX_LOOP_RESULT_BYTES = 1 << 20
RESULT_TIMEOUT_S = 60.0
"""How long to wait for a result that another worker has sent on its own connection."""
_SEAL_BYTES = 32


class CollectiveFrontend:
    """`spark_elastic.elastic.state.Frontend` over this process's link and groups."""

    loops = loops

    def rank(self) -> int:
        return process.require().rank

    def broadcast_object(self, value: Any, root: int) -> Any:
        return broadcast_object(value, root)

    def alone(self) -> AbstractContextManager[None]:
        return process.collectives_alone()

    def agree_on_update(self) -> bool:
        """Free of charge if gradients were reduced since the last check; otherwise one small reduction."""
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
        barrier()  # nobody is in this loop while another may still be in the last collective of the one before
        link.entered_loop()
        return Entry(root=0, version=None, sync=True, moved=False, from_last_loop=True)

    def _version_before(self) -> StateVersion | None:
        """That of the state which this process brings from the loop before; None: it brings none."""
        before = loops.kept(loops.entered - 1) if loops.entered > 1 and loops.unbroken else None
        return None if before is None else before.state.version

    def rejoin(self, version: StateVersion | None) -> Entry:
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

    def finished(self, loop: int, state: State, result: Any) -> None:
        if process.link is not None:
            state.save()
            loops.finish(loop, state, result)
            process.link.left_loop()

    def _offer_result(self, loop: int) -> None:
        """Rank 0 gives the driver what the loop returned: newcomers go on from there."""
        link, kept = process.link, loops.kept(loop)
        if link is None or kept is None or process.require().rank != 0:
            return
        problem, data = "", b""
        try:
            data = cloudpickle.dumps(kept.result)
        except Exception as error:  # pickling runs the code of whatever it is
            problem = f"it cannot be pickled ({type(error).__name__}: {error})"
        if len(data) > MAX_LOOP_RESULT_BYTES:
            problem, data = f"it is larger than {MAX_LOOP_RESULT_BYTES >> 20} MiB ({len(data):,} bytes)", b""
        if problem:
            log.warning(
                "workers that are lost in a later loop cannot be replaced: loop %d returned what others "
                "cannot be given, because %s",
                loop,
                problem,
            )
        link.offer_loop_result(loop, problem, b"" if problem else _seal(loop, data) + data)

    def result_of(self, loop: int) -> Any:
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
            process.stand_apart()
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

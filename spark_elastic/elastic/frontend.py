"""How the loop and the states leave a world, join the next one, and agree on when to do so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from spark_elastic.collective.objects import broadcast_object
from spark_elastic.collective.operations import barrier
from spark_elastic.collective.operators import Max
from spark_elastic.collective.process import process
from spark_elastic.elastic.finish import LaterLoop, loops, offer_result, result_of
from spark_elastic.elastic.run_checkpoints import RunCheckpoints
from spark_elastic.membership.topology import StateVersion

if TYPE_CHECKING:
    from spark_elastic.elastic.state import State


@dataclass(frozen=True, slots=True)
class Entry:
    """Facts about the world that a member has entered.

    Attributes:
        root: Rank of the member whose state all members take over.
        version: Version of that state; None if no member holds one yet.
        sync: False if all members report the same version.
        moved: Rank or size have changed.
        from_last_loop: All members have just come from the previous loop together. Until they have the same state, a
            failure is recovered from by running the end of that loop again.
    """

    root: int
    version: StateVersion | None
    sync: bool
    moved: bool
    from_last_loop: bool = False


class CollectiveFrontend:
    """The access of loops and states to this process's connection to the driver and to its groups."""

    loops = loops
    checkpoints: RunCheckpoints | None = None
    """Set by `call_with_checkpoints` before it calls the user's function."""

    def rank(self) -> int:
        return process.require().rank

    broadcast_object = staticmethod(broadcast_object)
    alone = staticmethod(process.local_collectives)
    result_of = staticmethod(result_of)

    def agree_on_update(self) -> bool:
        """Return True, on all members alike, if any of them knows of a coming world; at most a small reduction."""
        if process.link is None or process.provisional:
            return False
        agreed, process.update_agreed = process.update_agreed, None
        if agreed is not None:
            return agreed
        group = process.group()
        pending = process.update_pending
        if group is None:
            return pending
        token = torch.tensor([pending], dtype=torch.uint8, device="cpu")
        group.wait(group.allreduce(token, Max.gloo))
        return bool(token.item())

    def enter(self, prepare: Callable[[], None]) -> Entry:
        """Enter a loop; a newcomer waits here for its first world, and calls `prepare` before, while the others train.

        Raises HorovodInternalError if the world broke while it was being connected, or on the way from the previous
        loop, and LaterLoop if the job is in a later loop.
        """
        process.require()
        link = process.link
        if link is None:
            return Entry(root=0, version=None, sync=True, moved=False)
        if process.provisional:
            link.entered_loop()
            prepare()
            return self.rejoin(loops.version_before(), moved=False)
        assert process.assignment is not None
        world = process.assignment.world
        process.group()  # raises, if the world broke meanwhile
        if loops.entered == 1:
            link.entered_loop()
            return Entry(root=world.root, version=world.version, sync=True, moved=False)
        offer_result(loops.entered - 1)
        barrier()  # no member enters while another may still be in the last collective of the loop before
        link.entered_loop()
        return Entry(root=0, version=None, sync=True, moved=False, from_last_loop=True)

    def rejoin(self, version: StateVersion | None, moved: bool = True) -> Entry:
        """Leave a world that broke or is about to change, with a state of this version, and wait for another one.

        `moved`: `Entry.moved` is True in any case. Raises LaterLoop if the job is in a later loop.
        """
        if process.link is None:
            return Entry(root=0, version=version, sync=False, moved=True)
        before = process.require()
        if not process.join_next(version, loops.entered):
            raise LaterLoop()
        assert process.assignment is not None
        after, world = process.require(), process.assignment.world
        changed = (before.rank, before.size) != (after.rank, after.size)
        return Entry(root=world.root, version=world.version, sync=world.sync, moved=moved or changed)

    def finished(self, loop: int, state: State, result: Any) -> None:
        """Keep state and result of a loop that has returned, for the case that the function is called again."""
        if process.link is not None:
            state.save()
            loops.finish(loop, state, result)
            process.link.left_loop()

    def report_version(self, version: StateVersion) -> None:
        if process.link is not None:
            process.link.report_version(version)


frontend = CollectiveFrontend()

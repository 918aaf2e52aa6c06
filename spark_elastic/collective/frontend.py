"""This process's side of the elastic loop: leaving a world, joining the next, agreeing on when."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from spark_elastic.collective.objects import broadcast_object
from spark_elastic.collective.process import process
from spark_elastic.collective.reduction import Max
from spark_elastic.errors import HorovodInternalError
from spark_elastic.state import Entry
from spark_elastic.worker_link import Assignment

log = logging.getLogger("spark_elastic.collective")


class CollectiveFrontend:
    """`spark_elastic.state.Frontend` over this process's link and groups."""

    def rank(self) -> int:
        return process.require().rank

    def broadcast_object(self, value: Any, root: int) -> Any:
        return broadcast_object(value, root)

    def agree_on_update(self) -> bool:
        """Free of charge if gradients were reduced since the last check; otherwise one small reduction."""
        if process.link is None or process.assignment is None:
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
            return Entry(root=0, progress=None, sync=True, moved=False)
        first = not process.entered
        process.entered = True
        if first:
            link.entered_loop()
        if process.assignment is None:
            prepare()
            return self._join(0, None, moved=False)
        world = process.assignment.world
        process.group()  # raises, if the world broke meanwhile
        return Entry(root=world.root, progress=world.progress if first else None, sync=True, moved=False)

    def rejoin(self, progress: int | None) -> Entry:
        if process.link is None:
            return Entry(root=0, progress=progress, sync=False, moved=True)
        while True:
            round = process.assignment.world.round if process.assignment is not None else 0
            try:
                return self._join(round, progress, moved=True)
            except HorovodInternalError as error:
                log.info("the next world broke before it was connected: %s", error)

    def report_progress(self, progress: int) -> None:
        if process.link is not None:
            process.link.report_progress(progress)

    def _join(self, round: int, progress: int | None, moved: bool) -> Entry:
        assert process.link is not None
        before = process.require()
        process.updates_handled = max(process.updates_handled, process.link.updates_seen())
        process.leave()
        assignment: Assignment = process.link.join(round, progress)
        process.adopt(assignment)
        after = process.require()
        world = assignment.world
        changed = (before.rank, before.size) != (after.rank, after.size)
        return Entry(root=world.root, progress=world.progress, sync=world.sync, moved=moved or changed)


frontend = CollectiveFrontend()

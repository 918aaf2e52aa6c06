"""What a worker makes for its next world before it knows that world: a listener of Gloo, and memory to share.

The driver hands them on with the world, so that its members connect without asking it for anything.
"""

from __future__ import annotations

import logging

from spark_elastic.collective import devices
from spark_elastic.collective.gloo import Introduction, next_connection
from spark_elastic.collective.gloo_shutdown import open_sockets
from spark_elastic.collective.shared_memory import Offer
from spark_elastic.errors import HorovodInternalError
from spark_elastic.wire.messages import Endpoint
from spark_elastic.wire.worker_link import Assignment, Preparation, WorkerLink

log = logging.getLogger("spark_elastic.collective")


class Standby:
    """A listener and a segment of shared memory that wait for a world.

    Args:
        link: the connection to the driver.
        address: the address to listen at.
        note: the text that has to be the same for all members.

    Raises:
        UnknownLayoutError: Gloo's addresses cannot be read.
        RuntimeError: Gloo cannot listen there.
    """

    def __init__(self, link: WorkerLink, address: str, note: str) -> None:
        self.before = frozenset(open_sockets().values())  # members may connect as soon as the driver has the endpoint
        self._own, first = next_connection(address)
        self.offer = Offer(link)
        may = devices.may_use_gpu(devices.device_setting(), devices.device_info())
        kind = "gpu" if may else "cpu"
        self.endpoint = Endpoint(address, self._own.port, first, kind, self.offer.setting, note)

    @property
    def preparation(self) -> Preparation:
        return Preparation(self.endpoint, self.offer.announcement)

    def introduction(self, assignment: Assignment) -> Introduction | None:
        """Return what the members of a world have to know of one another; None if they have to exchange it.

        Raises:
            HorovodInternalError: the world expects this worker at another endpoint than the one it announced last.
        """
        endpoints = assignment.endpoints
        if not endpoints:
            return None
        if endpoints[assignment.world.member(assignment.worker).rank] != self.endpoint:
            raise HorovodInternalError(
                f"round {assignment.world.round} expects this worker at an endpoint that it has left"
            )
        return Introduction(self._own.host, endpoints, assignment.shared_memory, self.before)

    def close(self) -> None:
        """Free the segment, unless a group has taken it."""
        self.offer.close()

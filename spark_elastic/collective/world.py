"""Connect the members of a world: `connect` is the one place where a group is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from spark_elastic import clock
from spark_elastic.collective.gloo.rendezvous import AddressExchange, LinkStore
from spark_elastic.collective.gpu import devices
from spark_elastic.collective.gpu.nccl import NcclReductions
from spark_elastic.collective.group import Group
from spark_elastic.collective.joining import FOREVER_S
from spark_elastic.collective.one_thread import in_one_thread
from spark_elastic.collective.shared_memory.peers import find_peers
from spark_elastic.collective.shared_memory.reducer import SharedMemoryReducer
from spark_elastic.errors import HorovodInternalError
from spark_elastic.helper_thread import HelperThread
from spark_elastic.membership.topology import Member
from spark_elastic.wire.worker_link import Assignment, WorkerLink

log = logging.getLogger("spark_elastic.collective")


@in_one_thread
def connect(
    assignment: Assignment,
    link: WorkerLink,
    members: Sequence[Member],
    name: str = "global",
    note: str = "",
    made: Callable[[Group], None] = lambda group: None,
) -> Group:
    """Connect the members of a world, or some of them, and return their group; all of them call this.

    The members exchange their addresses through the driver, and Gloo connects each to all others. Those on one host
    then open one another's memory. NCCL is connected at the first tensor on a GPU. `members` are in the order of their
    ranks in the group, whose `name` no earlier group of the round has; `note` is a text for the others (`Group.notes`).
    `made` gets the group before it is connected, so that a cut of the round reaches it.

    Process groups that can be reconfigured in place (`reconfigure` in torch's c10d, after 2.13) would replace this.

    Raises HorovodInternalError if they did not connect in time, or the driver has ended the round; UsageError if the
    environment demands shared memory, which is impossible here; any error of a comparison that was begun for another
    group, and was completed meanwhile.
    """
    world, ranks = assignment.world, [member.rank for member in members]
    rank = [member.worker for member in members].index(assignment.worker)
    group = Group(link, world.round, name, rank, ranks)
    kind = "gpu" if devices.device_setting() != "cpu" and devices.device_info().gpus else "cpu"
    store = AddressExchange(link, world.round, name, rank, group.size, kind, note)
    addresses = [assignment.addresses[member] for member in ranks]
    try:
        made(group)
        if not name.startswith("global"):
            _wait_for_all(link, group)
        group.gloo.connect(store, addresses, link.stall_timeout_s, group.negotiation.serve)
        group.notes = [note for _, note, _ in store.table]
        if len({kind for kind, _, _ in store.table}) > 1:
            log.warning("some workers of this world may use GPUs and others have none: all reductions go through Gloo")
            return group
        if kind == "gpu":
            group.nccl = NcclReductions(group, lambda: LinkStore(link, world.round, f"nccl/{name}/"))
        if len({member.place.host for member in members}) == 1:
            found = find_peers(group, link.derive_key("shared memory"))
            if found is not None:
                group.shared_memory = SharedMemoryReducer(*found, group)
    except BaseException:
        group.close()
        raise
    return group


def members_of(name: str, assignment: Assignment) -> list[Member]:
    """Return the members of the group "global", "local" or "cross" that this process is in, by rank."""
    members = assignment.world.members
    me = assignment.world.member(assignment.worker)
    if name == "local":
        return [member for member in members if member.place.host == me.place.host]
    if name == "cross":
        return [member for member in members if member.local_rank == me.local_rank]
    return list(members)


def _wait_for_all(link: WorkerLink, group: Group) -> None:
    """Wait until all members have reached their first use of a set.

    Meanwhile the queues of other groups are compared: a member may come here only once their collectives are done.
    """
    all_are_here: Future[Sequence[str]] = Future()
    start = clock.monotonic()

    def wait() -> None:
        try:
            here = link.gather(group.round, f"{group.name}/here", group.rank, group.size, "", FOREVER_S)
            all_are_here.set_result(here)
        except BaseException as error:
            all_are_here.set_exception(error)

    link.blocked(True)
    try:
        HelperThread(wait, "first-use").start()
        group.negotiation.serve(all_are_here.done, start=True)
        all_are_here.result()
    except HorovodInternalError as error:
        waited_s = clock.monotonic() - start
        if waited_s < link.stall_timeout_s:
            raise HorovodInternalError(error.message) from error  # made here, so that a loop learns of it
        raise HorovodInternalError(
            f"{error}. This rank has waited for {waited_s:.0f} s at its first use of the process set of ranks "
            f"{list(group.world_ranks)} for the others of them, which may wait at their first use of another set. All "
            "ranks have to use their sets for the first time in one order, also with asynchronous collectives: call "
            "hvd.barrier(process_set=...) for each set, in the order in which they were added"
        ) from error
    finally:
        link.blocked(False)

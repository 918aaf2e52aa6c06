"""This process's place in the world: init, rank, size, and the groups of the round it stands in."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass

from spark_elastic import worker_link
from spark_elastic.collective.group import Group
from spark_elastic.core.topology import Member
from spark_elastic.errors import HorovodInternalError, NotInitializedError, OutsideLoopError
from spark_elastic.worker_link import Assignment, ProvisionalPosition, WorkerLink

log = logging.getLogger("spark_elastic.collective")


@dataclass(frozen=True, slots=True)
class Position:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1


class Process:
    """The one owner of the link and the groups. Only `_on_cut` is called from another thread than the user's."""

    def __init__(self) -> None:
        self._connections: dict[str, tuple[int, int]] = {}
        """By name of a group: the newest round in which it was connected, and how often. Outlives `shutdown`."""
        self._forget()

    def _forget(self) -> None:
        self.link: WorkerLink | None = None
        self.position: Position | None = None
        self.assignment: Assignment | None = None
        self.entered = False
        self.updates_handled = 0
        self.update_agreed: bool | None = None
        """What the reductions since the last check have said of a coming world; None: there was none."""
        self._groups: dict[str, Group | None] = {}
        self._cut: tuple[int, str] = (0, "")

    # --- life ---------------------------------------------------------------------------------

    def init(self) -> None:
        if self.position is not None:
            return
        self.link = worker_link.current()
        if self.link is None:
            self.position = Position()
            return
        self.link.on_cut(self._on_cut)
        answer = self.link.join_at_init()
        if isinstance(answer, ProvisionalPosition):
            self.position = Position(rank=answer.rank, size=answer.size)
            return
        while True:
            try:
                self.adopt(answer)
                return
            except HorovodInternalError as error:  # a member was lost at once; nothing has begun, so just go on
                log.info("round %d broke before it was connected: %s", answer.world.round, error)
                answer = self.link.join(answer.world.round, None)

    def adopt(self, assignment: Assignment) -> None:
        """Stand in this world from now on. Raises: HorovodInternalError: it broke before it was connected."""
        assert self.link is not None
        self.leave()
        me = assignment.world.member(assignment.worker)
        self.assignment = assignment
        self.position = Position(
            me.rank, assignment.world.size, me.local_rank, me.local_size, me.cross_rank, me.cross_size
        )
        self.updates_handled = max(self.updates_handled, assignment.updates_seen)
        self.group("global")

    def leave(self) -> None:
        """Disconnect from the present world; rank and size stay readable."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            if group is not None:
                group.close()
        self.update_agreed = None

    def shutdown(self) -> None:
        self.leave()
        if self.link is not None:
            self.link.on_cut(None)
        self._forget()

    # --- updates of the world -----------------------------------------------------------------

    @property
    def update_pending(self) -> bool:
        """Whether this process has been told of a coming world."""
        return self.link is not None and self.link.updates_seen() > self.updates_handled

    def saw_update(self, agreed: bool) -> None:
        """A reduction has told every member alike whether any of them has been told of a coming world."""
        self.update_agreed = agreed or bool(self.update_agreed)

    # --- groups -------------------------------------------------------------------------------

    def require(self) -> Position:
        if self.position is None:
            raise NotInitializedError("hvd.init() has not been called in this process")
        return self.position

    @property
    def provisional(self) -> bool:
        return self.link is not None and self.assignment is None

    def group(self, name: str = "global") -> Group | None:
        """The group of this round with that name ("global", "local" or "cross"); None if it has one member only.

        Made at the first use, by all its members together.

        Raises:
            OutsideLoopError: this process is not a member of a world yet.
            HorovodInternalError: the round is over.
        """
        if name in self._groups:
            group = self._groups[name]
            if group is not None:
                group.check_alive()
            elif self.assignment is not None and self._cut[0] >= self.assignment.world.round:
                raise HorovodInternalError(f"round {self._cut[0]} is over: {self._cut[1]}")
            return group
        self.require()
        if self.link is None:
            self._groups[name] = None
            return None
        if self.assignment is None:
            raise OutsideLoopError(
                "this worker joins a job that is already running and is a member of its world only inside the "
                "function decorated with hvd.elastic.run; move this collective into that function"
            )
        return self._connect(name, self.assignment)

    def _connect(self, name: str, assignment: Assignment) -> Group | None:
        assert self.link is not None
        me = assignment.world.member(assignment.worker)
        members = _members_of(name, assignment, me)
        if len(members) == 1:
            self._groups[name] = None
            return None
        key = name if name == "global" else f"{name}/{members[0].rank}"
        rank = [member.worker for member in members].index(me.worker)
        addresses = [assignment.addresses[member.worker] for member in members]
        hosts = [member.place.host for member in members]
        round = assignment.world.round
        # The driver keeps what was set in a round until it is over: who connects again, after `shutdown`, must not
        # find the addresses of the time before. All members come here equally often, as with any collective.
        last_round, times = self._connections.get(name, (0, 0))
        times = times + 1 if last_round == round else 1
        self._connections[name] = round, times
        group = Group(self.link, round, key if times == 1 else f"{key}#{times}", rank, addresses, hosts)
        self._groups[name] = group
        try:
            if self._cut[0] >= round:  # only now: a cut that comes from here on finds the group
                raise HorovodInternalError(f"round {round} is over: {self._cut[1]}")
            group.connect()
        except BaseException:
            self._groups.pop(name, None)
            raise
        return group

    def _on_cut(self, round: int, why: str) -> None:
        self._cut = (round, why)
        for group in list(self._groups.values()):
            if group is not None and group.round <= round:
                group.cut(why)


def _members_of(name: str, assignment: Assignment, me: Member) -> list[Member]:
    members = assignment.world.members
    if name == "local":
        return [member for member in members if member.place.host == me.place.host]
    if name == "cross":
        return [member for member in members if member.local_rank == me.local_rank]
    return list(members)


process = Process()
atexit.register(process.leave)


def init(*args: object, **kwargs: object) -> None:
    """Join the job that this process was started for; a world of one outside of a job. Repeats do nothing.

    In a job that is already running, the position is provisional until the elastic loop is entered. Arguments that
    Horovod knows are accepted and ignored.
    """
    process.init()


def shutdown() -> None:
    """Leave the world; `init` may be called again."""
    process.shutdown()


def is_initialized() -> bool:
    return process.position is not None


def rank() -> int:
    """This process's number in the world. Raises: NotInitializedError."""
    return process.require().rank


def size() -> int:
    """Processes in the world. Raises: NotInitializedError."""
    return process.require().size


def local_rank() -> int:
    """This process's number among those on its host. Raises: NotInitializedError."""
    return process.require().local_rank


def local_size() -> int:
    """Processes of the world on this host. Raises: NotInitializedError."""
    return process.require().local_size


def cross_rank() -> int:
    """The number of this host among those that have this local rank. Raises: NotInitializedError."""
    return process.require().cross_rank


def cross_size() -> int:
    """Hosts that have this local rank. Raises: NotInitializedError."""
    return process.require().cross_size


def is_homogeneous() -> bool:
    """Whether every host has equally many processes."""
    process.require()
    if process.assignment is None:
        return True
    return len({member.local_size for member in process.assignment.world.members}) == 1

"""This process's position in the world: `init`, `rank`, `size`, and the groups of its round."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.collective.group import Group
from spark_elastic.collective.one_thread import in_one_thread
from spark_elastic.collective.world import connect, members_of
from spark_elastic.errors import HorovodInternalError, NotInitializedError
from spark_elastic.membership.topology import StateVersion
from spark_elastic.wire import worker_link
from spark_elastic.wire.messages import Provisional
from spark_elastic.wire.worker_link import Assignment, WorkerLink

if TYPE_CHECKING:
    from spark_elastic.collective.process_sets import ProcessSet

log = logging.getLogger("spark_elastic.collective")


@dataclass(frozen=True, slots=True)
class Position:
    """The ranks and sizes of this process in its world; by default of a world of one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1


class Process:
    """The state of this process: the link to the driver, its position and its groups.

    There is one instance, `process`. Its methods are called on the user's thread, and `_on_cut` on the channel's.
    """

    def __init__(self) -> None:
        self._connections: dict[str, tuple[int, int]] = {}
        """By group name: the newest round in which it was connected, and how often. It survives `shutdown`."""
        self._followers: list[Callable[[Position], None]] = []
        """Called with each new position, on the user's thread. They survive `shutdown`."""
        self.in_loop = False
        """True in an elastic loop that no earlier call of the user's function has finished; set by `LoopHistory`."""
        self.called_again = False
        """True if the user's function was called again after a loop, and has not joined a world since."""
        self._reset()

    def _reset(self) -> None:
        self.link: WorkerLink | None = None
        self.position: Position | None = None
        self.assignment: Assignment | None = None
        self.awaits_loop = False
        """True from the end of this process's world until the elastic loop, where it joins the next one."""
        self.is_local = False
        """True within `local_collectives`: this process is a member of a world, but its collectives stay local."""
        self._warned = False
        self.updates_handled = 0
        self.update_agreed: bool | None = None
        """Since the last check, a reduction has reported a coming world (True) or none (False); None: no reduction."""
        self._groups: dict[str, Group | None] = {}
        for chosen in getattr(self, "sets", {}).values():
            chosen.process_set_id = None
        self.sets: dict[int, ProcessSet] = {}
        """The sets of chosen ranks, by id, in the order in which they were added."""
        self._next_set = 1

    # --- joining and leaving worlds -----------------------------------------------------------

    def init(self, sets: Iterable[ProcessSet] = ()) -> None:
        """Register the process sets, and take a position in the world unless this process has one; see `init` below."""
        if self.position is not None and not self.provisional:
            return
        for chosen in sets:
            if chosen.process_set_id is None:
                self.register(chosen)
        if self.position is not None:
            return
        self.link = worker_link.current()
        if self.link is None:
            self._set_position(Position())
            return
        self.link.on_cut = self._on_cut
        answer = self.link.join_at_init()
        if isinstance(answer, Provisional):
            self._set_position(Position(rank=answer.rank, size=answer.size))
        elif self.called_again:
            self._take_position(answer)  # that world is over; the loop joins the next
            self.awaits_loop = True
        else:
            try:
                self.adopt(answer)
            except HorovodInternalError as error:  # a member was lost at once, before anything was computed
                log.info("round %d broke before it was connected: %s", answer.world.round, error)
                self.join_next(None, 0)

    def join_next(self, version: StateVersion | None, loop: int) -> bool:
        """Leave the present world, with a state of this version, and wait until a later one is connected.

        Return False, in no world, if the job is in a later loop than `loop`, the one that was entered last (0: none).
        """
        assert self.link is not None
        while True:
            round = 0 if self.assignment is None else self.assignment.world.round
            self.updates_handled = max(self.updates_handled, self.link.updates_seen())
            # closing the groups takes as long as the driver needs for the next world
            answer = self.link.join(round, version, loop, meanwhile=self.leave)
            if isinstance(answer, Provisional):
                self.leave_until_loop()
                return False
            try:
                self.adopt(answer)
                return True
            except HorovodInternalError as error:
                log.info("round %d broke before it was connected: %s", answer.world.round, error)

    def adopt(self, assignment: Assignment) -> None:
        """Leave the present world and join this one. Raise HorovodInternalError if it broke before it was connected."""
        self.leave()
        for chosen in list(self.sets.values()):
            if chosen.ends_with_world:
                self.unregister(chosen)
        self._take_position(assignment)
        self.awaits_loop = False
        self.updates_handled = max(self.updates_handled, assignment.updates_seen)
        self.group("global")
        self.called_again = False

    def _take_position(self, assignment: Assignment) -> None:
        me = assignment.world.member(assignment.worker)
        self.assignment = assignment
        self._set_position(
            Position(me.rank, assignment.world.size, me.local_rank, me.local_size, me.cross_rank, me.cross_size)
        )

    def _set_position(self, position: Position) -> None:
        self.position = position
        for follower in self._followers:
            follower(position)

    def follow(self, follower: Callable[[Position], None]) -> None:
        """Call a function with each new position of this process, and at once with the present one."""
        self._followers.append(follower)
        if self.position is not None:
            follower(self.position)

    def run_again(self) -> None:
        """Prepare for another call of the user's function, which adds its process sets and reaches a loop again."""
        self.called_again = True
        for chosen in list(self.sets.values()):
            self.unregister(chosen)
        self.leave_until_loop()

    def leave_until_loop(self) -> None:
        """Leave the world; collectives are local until an elastic loop joins the next one."""
        self.leave()
        self.awaits_loop = self.assignment is not None

    def leave(self) -> None:
        """Disconnect from the present world; rank and size stay readable."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            if group is not None:
                group.close()
        self.update_agreed = None

    def shutdown(self) -> None:
        self.leave()
        self._reset()

    # --- sets of chosen ranks -----------------------------------------------------------------

    def register(self, chosen: ProcessSet) -> None:
        """Give the set an id, which makes it usable."""
        chosen.process_set_id = self._next_set
        self.sets[self._next_set] = chosen
        self._next_set += 1

    def unregister(self, chosen: ProcessSet) -> None:
        """Take the set's id away, and close its group unless another set has the same members."""
        number, chosen.process_set_id = chosen.process_set_id, None
        if number is not None:
            del self.sets[number]
        in_use = {name_of_group(known.ranks, self.require().size) for known in self.sets.values()}
        for name in [name for name in self._groups if name.startswith(_SET) and name not in in_use]:
            group = self._groups.pop(name)
            if group is not None:
                group.close()

    # --- updates of the world -----------------------------------------------------------------

    @property
    def update_pending(self) -> bool:
        """True if the driver has announced a coming world to this process."""
        return self.link is not None and self.link.updates_seen() > self.updates_handled

    def saw_update(self, agreed: bool) -> None:
        """Record the result of a reduction: True if the driver has announced a coming world to any of the members."""
        self.update_agreed = agreed or bool(self.update_agreed)

    # --- groups -------------------------------------------------------------------------------

    def require(self) -> Position:
        """Return the position. Raise NotInitializedError if `init` has not been called."""
        if self.position is None:
            raise NotInitializedError("hvd.init() has not been called in this process")
        return self.position

    @property
    def provisional(self) -> bool:
        """True while this process is in no world, so that its collectives are local.

        That is so for a newcomer, and for a process that runs its function again, until the elastic loop is entered;
        and for all processes during their reset callbacks.
        """
        return self.link is not None and (self.assignment is None or self.awaits_loop or self.is_local)

    @property
    def is_newcomer(self) -> bool:
        """True in a job that runs already, until this process joins its first world."""
        return self.link is not None and self.position is not None and self.assignment is None

    @contextmanager
    def local_collectives(self) -> Iterator[None]:
        """Keep collectives local within this context: each returns this process's own values."""
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = False

    def group(self, name: str = "global", ranks: Sequence[int] | None = None) -> Group | None:
        """Return the group of this round with that name; all its members connect it together at its first use.

        `ranks` are the members' ranks, this process's among them, for a group of chosen ranks. None if the group has
        only one member, or if this process is `provisional`.

        Raises:
            HorovodInternalError: the round is over.
        """
        if self.provisional:
            if self.is_local:
                log.info("a collective in a reset callback reaches no other worker, and gives this worker's own values")
            elif not self._warned:
                self._warned = True
                log.warning(
                    "this worker joins the others in the elastic loop; until then its collectives reach no other "
                    "worker, and give its own values. Keep what was computed with them in the state, which the loop "
                    "brings"
                )
            return None
        if name in self._groups:
            group = self._groups[name]
            if group is not None:
                group.check_alive()
            elif self.link is not None and self.assignment is not None:
                self.link.check_cut(self.assignment.world.round)
            return group
        self.require()
        if self.link is None:
            self._groups[name] = None
            return None
        assert self.assignment is not None
        return self._connect(name, self.assignment, ranks)

    @in_one_thread
    def _connect(self, name: str, assignment: Assignment, ranks: Sequence[int] | None) -> Group | None:
        link, world = self.link, assignment.world
        assert link is not None
        members = members_of(name, assignment) if ranks is None else [world.members[rank] for rank in ranks]
        if len(members) == 1:
            self._groups[name] = None
            return None
        # The driver keeps the keys of a round until it is over. A group that connects again after `shutdown` must not
        # find its old addresses, so its key has a number. All members connect equally often, as with any collective.
        last_round, times = self._connections.get(name, (0, 0))
        times = times + 1 if last_round == world.round else 1
        self._connections[name] = world.round, times
        key = f"{name}/{members[0].rank}" if name in ("local", "cross") else name
        note = "; ".join(str(chosen.ranks) for chosen in self.sets.values()) if name == "global" else ""

        def made(group: Group) -> None:
            self._groups[name] = group
            link.check_cut(world.round)  # here: later cuts find the group in `_groups`

        try:
            return connect(assignment, link, members, key if times == 1 else f"{key}#{times}", note, made)
        except BaseException:
            self._groups.pop(name, None)
            raise

    def _on_cut(self, round: int, why: str) -> None:
        for group in list(self._groups.values()):
            if group is not None and group.round <= round:
                group.cut(why)


_SET = "set "


def name_of_group(ranks: Sequence[int], size: int) -> str:
    """Return the name of the group of a set with these ranks, in a world of this size."""
    return _SET + ",".join(str(rank) for rank in ranks if rank < size)


process = Process()
atexit.register(process.leave)


def init(comm: Any = None, process_sets: str | Iterable[ProcessSet] | None = None, **kwargs: object) -> None:
    """Join the job that this process was started for, or a world of one outside of a job. Repeats do nothing.

    In a job that is already running, the position is provisional until the elastic loop is entered.

    Args:
        comm: accepted for compatibility with Horovod; ignored.
        process_sets: sets of chosen ranks to add, the same on all ranks.
        **kwargs: other arguments of Horovod; ignored.
    """
    process.init(() if process_sets is None or isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Leave the world; `init` may be called again."""
    process.shutdown()


def is_initialized() -> bool:
    """Return True after `init` and before `shutdown`."""
    return process.position is not None


# All functions below raise NotInitializedError before `init`.


def rank() -> int:
    """Return this process's rank in the world."""
    return process.require().rank


def size() -> int:
    """Return the number of processes in the world."""
    return process.require().size


def local_rank() -> int:
    """Return this process's rank among those on its host."""
    return process.require().local_rank


def local_size() -> int:
    """Return the number of the world's processes on this host."""
    return process.require().local_size


def cross_rank() -> int:
    """Return the index of this host among the hosts that have this local rank."""
    return process.require().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return process.require().cross_size


def is_homogeneous() -> bool:
    """Return True if all hosts have the same number of processes."""
    process.require()
    if process.assignment is None:
        return True
    return len({member.local_size for member in process.assignment.world.members}) == 1

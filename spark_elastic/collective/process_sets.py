"""Process sets, on which a collective can be called: the world, its parts by host, and sets of chosen ranks.

A set of chosen ranks consists of **numbers of ranks**, as with Horovod: its members in a world are the ranks of the set
that exist in this world. After a loss the survivors get new ranks, so the set may have other workers in the next world.
A set can also be given as a rule, which is called for each size of the world.

A set that is added before the elastic loop, where newcomers add it too, stays for all worlds. A set that is added
inside of the loop belongs to the present world: the loop's function is called again in the next one and adds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spark_elastic.collective.calls import agree
from spark_elastic.collective.group import Group
from spark_elastic.collective.process import name_of_group, process
from spark_elastic.collective.world import members_of
from spark_elastic.errors import MismatchError, UsageError

Rule = Callable[[int], Iterable[int]]
"""A function that returns the ranks of a set in a world of the given size."""


class ProcessSet:
    """Chosen ranks of the world; usable between `add_process_set` and `remove_process_set`.

    Args:
        ranks: rank numbers, or a rule that returns them for a size of the world.

    Raises:
        UsageError: the ranks are not numbers, or are negative or repeated.
    """

    def __init__(self, ranks: Iterable[int] | Rule) -> None:
        self.process_set_id: int | None = None
        self.ends_with_world = False
        """It was added inside of the elastic loop, and is removed with the present world."""
        self._rule: Rule | None = ranks if callable(ranks) else None
        self._ranks = () if callable(ranks) else _checked(ranks)

    @property
    def ranks(self) -> list[int]:
        """The given rank numbers; for a rule, its ranks in the present world."""
        return list(self._ranks if self._rule is None else _checked(self._rule(process.require().size)))

    def _members(self) -> list[int]:
        """Return the ranks of the set that exist in the present world. Raise UsageError if the set is not in use."""
        if self.process_set_id is None:
            raise UsageError(
                f"{self} is not in use: it was not added with hvd.add_process_set, was removed, or was added inside of "
                "the elastic loop and ended with its world; add it before the loop, or again in each call of its "
                "function"
            )
        size = process.require().size
        return [rank for rank in self.ranks if rank < size]

    def group(self) -> Group | None:
        """Return the group of the set; None if this process is alone in it.

        Raises:
            UsageError: this process is not a member of the set.
            MismatchError: other ranks have other sets.
        """
        position = process.require()
        if process.provisional:
            return process.group()
        members = self._members()
        if position.rank not in members:
            raise UsageError(
                f"rank {position.rank} is not in {self}, of which {members} exist in this world of {position.size}; "
                "ask process_set.included() before a collective"
            )
        whole = process.group()
        if whole is not None and len(set(whole.notes)) > 1:
            shown = ", ".join(f"rank {rank}: [{note}]" for rank, note in enumerate(whole.notes))
            raise MismatchError(
                f"ranks began this world with different process sets: {shown}; add the same sets before the elastic "
                "loop on all ranks, a newcomer's too"
            )
        return process.group(name_of_group(members, position.size), members)

    def size(self) -> int:
        """Return the number of processes in the set; 1 in a newcomer before the elastic loop."""
        members = self._members()
        return 1 if process.provisional else len(members)

    def rank(self) -> int:
        """Return this process's rank in the set.

        Raises:
            UsageError: it is not a member.
        """
        members = self._members()
        if process.provisional:
            return 0
        rank = process.require().rank
        if rank not in members:
            raise UsageError(f"rank {rank} is not in {self}; ask process_set.included() first")
        return members.index(rank)

    def included(self) -> bool:
        """Return True if this process is in the set, or in no world, as before the elastic loop."""
        members = self._members()
        return process.provisional or process.require().rank in members

    def set_rank_of(self, root_rank: int) -> int:
        """Return the rank in this set of the process with that rank in the world.

        Raises:
            UsageError: it is not a member.
        """
        members = self._members()
        if process.provisional:
            return 0
        if root_rank not in members:
            raise UsageError(
                f"root_rank={root_rank} is not in {self}; give a member's rank in the world, one of {members}"
            )
        return members.index(root_rank)

    def __repr__(self) -> str:
        shown: Any = list(self._ranks) if self._rule is None else self._rule
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={shown})"


class StandingSet(ProcessSet):
    """A set that exists in every world: "global", "local" or "cross". Its `root_rank` is a rank within the set."""

    def __init__(self, name: str) -> None:
        super().__init__([])
        self.name = name
        self.process_set_id = 0 if name == "global" else None

    @property
    def ranks(self) -> list[int]:
        """The world's ranks that are in the set."""
        position = process.require()
        if process.assignment is None:
            return [position.rank] if self.name != "global" else list(range(position.size))
        return [member.rank for member in members_of(self.name, process.assignment)]

    def group(self) -> Group | None:
        return process.group(self.name)

    def _members(self) -> list[int]:
        return self.ranks

    def included(self) -> bool:
        return True

    def set_rank_of(self, root_rank: int) -> int:
        if not 0 <= root_rank < self.size():
            raise UsageError(f"root_rank={root_rank} is not a rank of {self!r}, which has {self.size()}")
        return root_rank

    def __repr__(self) -> str:
        return f"<ProcessSet {self.name}>"


def _checked(ranks: Iterable[Any]) -> tuple[int, ...]:
    numbers = list(ranks) if isinstance(ranks, Iterable) and not isinstance(ranks, str) else None
    if numbers is None or not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in numbers):
        raise UsageError(
            f"a ProcessSet is made of ranks, such as [0, 2], or of a function of the size, not of {ranks!r}"
        )
    if len(set(numbers)) < len(numbers) or min(numbers, default=0) < 0:
        raise UsageError(f"a ProcessSet needs different ranks that are not negative, not {numbers}")
    return tuple(sorted(numbers))


global_process_set = StandingSet("global")
"""All processes of the world."""
local_process_set = StandingSet("local")
"""The processes on this host."""
cross_process_set = StandingSet("cross")
"""The processes with this one's local rank, one on each host."""


def add_process_set(process_set: ProcessSet | Sequence[int] | Rule) -> ProcessSet:
    """Make a set of chosen ranks usable; all ranks of the world call this, with the same ranks.

    Ranks that do not exist now are allowed: they may exist in a larger world.

    The first use of a set in a world, also by an asynchronous collective, waits for the set's other ranks. So all ranks
    have to use their sets for the first time in one order, such as that in which the sets were added.

    Returns:
        The set.

    Raises:
        UsageError: outside of the elastic loop, there is a set of these ranks already.
        MismatchError: the ranks of the world add different sets.
        NotInitializedError: `init` has not been called.
    """
    process.require()
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if isinstance(chosen, StandingSet) or chosen.process_set_id is not None:
        raise UsageError(f"{chosen} is in use already")
    in_loop = process.in_loop and (process.is_local or not process.provisional)
    fixed = [known for known in process.sets.values() if known._rule is None]
    same = next((known for known in fixed if known.ranks == chosen.ranks), None)
    # inside of the loop, ranks are computed from the size, and may equal those of another set by chance
    if same is not None and chosen._rule is None and not in_loop:
        raise UsageError(f"there is a set of these ranks already: {same}; use that one, or remove it first")
    agree(process.group(), "add_process_set", str(chosen.ranks))
    chosen.ends_with_world = in_loop
    process.register(chosen)
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; all ranks of the world call this, after they have waited for all of its collectives.

    Returns:
        True if it was removed; False for the sets that exist in every world, and for sets that are not in use.
    """
    process.require()
    if isinstance(process_set, StandingSet) or process_set.process_set_id is None:
        return False
    agree(process.group(), "remove_process_set", str(process_set.ranks))
    process.unregister(process_set)
    return True

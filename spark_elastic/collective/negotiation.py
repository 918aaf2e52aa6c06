"""Compare what the members of a group are about to do, before any data is sent.

A backend cannot be asked to do different things on different ranks: Gloo aborts the process, waits for ever, or adds up
what does not belong together. So a collective is queued first. Where a member has to wait for one, all members compare
their queues: usually they are equal, which one small all-reduce of a fingerprint shows. Otherwise the queues themselves
are exchanged: what all members have queued alike is launched, in one order; what they have queued differently, or what
nobody else will ever come to, fails on every member with the same error.

The buckets of an optimizer do not pass through here: their layout is compared once for each world.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from spark_elastic import clock
from spark_elastic.collective.joining import STALL_S
from spark_elastic.errors import MismatchError, SparkElasticError, UsageError

if TYPE_CHECKING:
    from spark_elastic.collective.gloo import GlooGroup

Launched = tuple[Sequence[Any], Callable[[], Any]]
"""The works of a collective, and what turns them into its result once they are done."""

_LONGEST_QUEUE_BYTES = 64 << 20
_LONGEST_TEXT = 300
_MOST_VARIANTS = 4
_PAUSE_S = 1e-4


class Pending:
    """A collective that was called and is not launched yet.

    Args:
        key: its name, or its number among those of its kind without a name.
        what: what has to be the same on all members.
        problem: why this member's call is refused, which the others have to be told.
        detail: what may be another one on each member.
    """

    __slots__ = ("alike", "detail", "error", "key", "kind", "launch", "launched", "problem", "what")

    def __init__(
        self, kind: str, key: str, what: str, problem: str, launch: Callable[[], Launched] | None, detail: str = ""
    ) -> None:
        self.kind = kind
        self.key = key
        self.what = what
        self.problem = problem
        self.detail = detail
        self.alike = False
        """Whether it is known that all members have the same detail; the same answer on all of them."""
        self.launch = launch
        self.launched: Launched | None = None
        self.error: Exception | None = None

    @property
    def is_settled(self) -> bool:
        return self.launched is not None or self.error is not None

    def told(self) -> list[str]:
        """What the other members learn of it."""
        return [self.key, self.kind, self.what, self.problem]

    def start(self) -> None:
        """Launch it; an error is kept for who waits for it."""
        launch, self.launch = self.launch, None
        try:
            self.launched = ((), _nothing) if launch is None else launch()
        except Exception as error:
            self.error = error

    def fail(self, error: Exception) -> None:
        self.launch = None
        self.error = error


class _Comparison:
    """One that is under way. queued: what this member had queued when it began."""

    __slots__ = ("queued", "token", "work")

    def __init__(self, queued: list[Pending], token: torch.Tensor, work: Any) -> None:
        self.queued = queued
        self.token = token
        self.work = work


class Negotiation:
    """The queue of one group. The group's thread uses it.

    While a member waits for one group, it compares the queues of its other groups, too: another member of those may
    wait for that before it comes to this one.
    """

    def __init__(self, group: GlooGroup) -> None:
        self._group = group
        self._queue: dict[str, Pending] = {}
        self._numbers: dict[str, int] = {}
        """How many collectives of each kind without a name were queued."""
        self._comparison: _Comparison | None = None
        self._busy = False
        self._waiting = False

    @property
    def is_due(self) -> bool:
        """Whether something was queued that must come before whatever is launched next."""
        return bool(self._queue) and not self._busy

    def queue(
        self,
        kind: str,
        name: str | None,
        what: str,
        launch: Callable[[], Launched] | None,
        problem: str = "",
        detail: str = "",
    ) -> Pending:
        """Add a collective; it is launched, at the latest, when it is waited for.

        Raises: UsageError: one of this name is queued already.
        """
        if name is None:
            number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
            key = f"{kind} {number}"
        else:
            key = f"{kind} named {name!r}"
        if key in self._queue:
            raise UsageError(f"{key} is under way already; synchronize it first, or give the second another name")
        pending = Pending(kind, key, what, problem, launch, detail)
        self._queue[key] = pending
        _in_use.add(self)
        return pending

    def bring(self, pending: Pending) -> Launched:
        """Block until all members have called this one, and launch it.

        Raises:
            MismatchError: they have called something else, or the same in another way.
            HorovodInternalError: a peer is gone.
        """
        while not pending.is_settled:
            if pending.key not in self._queue:
                self._group.check_alive()
                raise AssertionError(f"{pending.key} was never launched")
            self._compare()
        if pending.error is not None:
            raise pending.error
        assert pending.launched is not None
        return pending.launched

    def settle(self) -> None:
        """Launch all that is queued: something that does not pass through the queue comes next.

        Raises: as `bring`.
        """
        while self._queue:
            waiting = list(self._queue.values())
            self._compare()
            for pending in waiting:
                if isinstance(pending.error, SparkElasticError):
                    raise pending.error

    def serve_others(self, work: Any) -> None:
        """Complete the comparisons that were begun for other groups, before this member blocks in `work`.

        Their other members go on to launch what they have compared. That takes room in shared memory which is free only
        once this member has launched the same, and before that they do not come to `work`.
        """
        begun = [other for other in _in_use if other is not self and other._comparison is not None]
        if begun:
            self._serve(begun, work.is_completed, begin=False)

    def start_anew(self) -> None:
        """All members are at the same place, with nothing under way; some have called less than others."""
        self._numbers.clear()

    def close(self) -> None:
        """The group is over; who waits for something queued here finds that out."""
        _in_use.discard(self)

    # --- comparing ----------------------------------------------------------------------------

    def _compare(self) -> None:
        self._waiting = True
        try:
            self._begin()
            others = [other for other in _in_use if other is not self and other._queue]
            if others:
                self._serve(others, self._is_over, begin=True)
            self._end()
        finally:
            self._waiting = False

    def _begin(self) -> None:
        if self._comparison is not None:
            return
        self._busy = True
        try:
            queued = list(self._queue.values())
            what = _fingerprint(json.dumps([pending.told() for pending in queued]))
            detail = _fingerprint(json.dumps([pending.detail for pending in queued]))
            # the largest and the smallest are the same; a rank that has joined adds nothing to a maximum
            token = torch.tensor([what, -what, detail, -detail])
            self._comparison = _Comparison(queued, token, self._group.allreduce(token, dist.ReduceOp.MAX))
        finally:
            self._busy = False

    def _is_over(self) -> bool:
        """Whether `_end` would not block for long."""
        return self._comparison is None or bool(self._comparison.work.is_completed())

    def _end(self) -> None:
        comparison, self._comparison = self._comparison, None
        if comparison is None:
            return
        self._busy = True
        try:
            self._group.wait(comparison.work)
            most, least, most_detail, least_detail = comparison.token.tolist()
            if most == -least:
                for pending in comparison.queued:
                    del self._queue[pending.key]
                    pending.alike = most_detail == -least_detail
                for pending in comparison.queued:
                    pending.start()
            else:
                self._sort_out(self._everyones_queues(comparison.queued))
        finally:
            self._busy = False

    def _serve(self, others: list[Negotiation], is_over: Callable[[], bool], begin: bool) -> None:
        """Do what members of other groups may wait for, until `is_over()` or nothing is left to do.

        begin: also begin comparisons of what is queued there; False: only complete those that were begun.
        """
        began, stalled = clock.monotonic(), False
        try:
            while not is_over() and (begin or any(other._comparison is not None for other in others)):
                self._group.check_alive()
                for other in others:
                    if begin and other._queue:
                        other._begin()
                    if other._comparison is not None and other._is_over():
                        other._end()
                if not stalled and clock.monotonic() - began > STALL_S:
                    stalled = True
                    self._group.stalls(True)
                time.sleep(_PAUSE_S)
        finally:
            if stalled:
                self._group.stalls(False)

    def _everyones_queues(self, queued: list[Pending]) -> dict[int, _Told]:
        """By rank in the group, without those that have joined."""
        group = self._group
        entries = [pending.told() for pending in queued]
        mine = json.dumps({"waits": self._waiting, "numbers": self._numbers, "queue": entries}).encode()
        sizes = torch.empty(group.size, dtype=torch.int64)
        group.wait(group.allgather(sizes, torch.tensor([len(mine)])))
        longest = int(sizes.max())
        if longest > _LONGEST_QUEUE_BYTES or int(sizes.min()) < 0:
            raise UsageError(f"more collectives are under way than can be compared ({longest} bytes); synchronize some")
        sent = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
        everyone = sent.new_empty((group.size, longest))
        group.wait(group.allgather(everyone.view(-1), sent))
        return {
            rank: _Told(json.loads(row.numpy().tobytes()[:size]))
            for rank, (row, size) in enumerate(zip(everyone, sizes.tolist(), strict=True))
            if size
        }

    def _sort_out(self, told: dict[int, _Told]) -> None:
        """Launch what all have queued alike, fail what they have queued differently."""
        queues = {rank: each.queue for rank, each in told.items()}
        first = next(iter(queues.values()))
        common = [key for key in first if all(key in queue for queue in queues.values())]
        if not common:
            if all(each.waits for each in told.values()):
                self._fail_all(told)
            return
        for key in common:
            pending = self._queue.pop(key)
            entries = {rank: queue[key] for rank, queue in queues.items()}
            refused = {rank: entry[3] for rank, entry in entries.items() if entry[3]}
            if refused:
                pending.fail(MismatchError(f"{key} cannot be done: {self._by_rank(refused)}"))
            elif len({entry[2] for entry in entries.values()}) > 1:
                shown = self._by_rank({rank: entry[2] for rank, entry in entries.items()})
                pending.fail(
                    MismatchError(f"ranks call {key} differently: {shown}; types, shapes and settings must be the same")
                )
            else:
                pending.start()

    def _fail_all(self, told: dict[int, _Told]) -> None:
        error = MismatchError(
            "ranks wait for collectives that other ranks do not call: "
            + self._by_rank({rank: "; ".join(map(_said, each.queue.values())) for rank, each in told.items()})
            + "; call the same ones, with the same names and in the same order, on all ranks"
        )
        for pending in self._queue.values():
            pending.fail(error)
        self._queue.clear()
        for each in told.values():
            for kind, number in each.numbers.items():
                self._numbers[kind] = max(number, self._numbers.get(kind, 0))

    def _by_rank(self, texts: dict[int, str]) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, text in texts.items():
            ranks.setdefault(text, []).append(self._group.world_ranks[rank])
        alike = _common_start(list(ranks)) if len(ranks) > 1 else 0
        start = max(0, alike - _LONGEST_TEXT // 3)
        shown = [
            f"{'rank' if len(who) == 1 else 'ranks'} {_listed(who)}: {_short(text, start)}"
            for text, who in list(ranks.items())[:_MOST_VARIANTS]
        ]
        return ", ".join(shown) + (f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else "")


class _Told:
    """What a member has told of itself: whether it waits for something in its queue, and the queue by key."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.waits: bool = message["waits"]
        self.numbers: dict[str, int] = message["numbers"]
        self.queue: dict[str, list[str]] = {entry[0]: entry for entry in message["queue"]}


_in_use: weakref.WeakSet[Negotiation] = weakref.WeakSet()
"""Those in which something was queued."""


def _fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _nothing() -> None:
    """There is no result."""


def _said(entry: list[str]) -> str:
    return f"{entry[0]} ({entry[2]})" if entry[2] else entry[0]


def _common_start(texts: list[str]) -> int:
    """How many characters all of them begin with."""
    return next((at for at, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), len(min(texts)))


def _short(text: str, start: int) -> str:
    """The part of a text from `start` on, where it is of interest."""
    if len(text) <= _LONGEST_TEXT:
        return text
    part = text[start : start + _LONGEST_TEXT]
    return ("..." if start else "") + part + ("..." if start + len(part) < len(text) else "")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

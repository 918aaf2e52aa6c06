"""Compare the collectives that the members of a group have called, before any data is sent.

If members call different collectives, Gloo aborts the process, waits for ever, or combines tensors that do not belong
together. So a collective is queued first. When a member has to wait for one, all members compare their queues. Usually
the queues are equal, which one small all-reduce of a fingerprint shows. Otherwise the queues themselves are exchanged:
collectives that all members have queued alike are launched, in one order; those that they have queued differently, or
that some members never call, fail on every member with the same error.

A member takes part in the comparisons of several groups at the same time, and members may wait for those groups in
different orders. So a comparison is a generator, as is a launch that needs an exchange of its own (of row counts, say).
It yields each work that it waits for. While a member waits for one group, it continues the others' generators as far as
their works are complete; it never blocks in one of them.

The buckets of an optimizer are not queued here: their layout is compared once for each world.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spark_elastic import clock
from spark_elastic.collective.one_thread import in_one_thread
from spark_elastic.collective.reduce import STALL_S, GroupContext
from spark_elastic.errors import MismatchError, SparkElasticError, UsageError

Launched = tuple[Sequence[Any], Callable[[], Any]]
"""The launched operations (works) of a collective, and the function that makes its result once they are complete."""

Launching = Generator[Any, None, Launched]
"""A launch that waits: it yields each work that has to be complete before it continues; see `until_done`."""

_LONGEST_QUEUE_BYTES = 64 << 20
_LONGEST_TEXT = 300
_MOST_VARIANTS = 4
_PAUSE_S = 1e-4


@dataclass(slots=True, eq=False)
class Pending:
    """A collective that was called and is not launched yet."""

    key: str
    """The user's name for the call; without one, its number among the calls of this collective without a name."""
    description: str
    """A text that must be the same on all members."""
    problem: str
    """The error of this member's call, for the others; "" if it is valid."""
    launch: Callable[[], Launched | Launching] | None
    """Launches it; None if there is nothing to launch."""
    detail: str = ""
    """A text that may differ between members."""
    alike: bool = False
    """True once all members are known to have the same detail; all members get the same answer."""
    launched: Launched | None = None
    error: Exception | None = None

    def start(self) -> Generator[Any, None, None]:
        """Launch it, yielding what that waits for; an error is kept and raised to the waiting caller."""
        try:
            launched = ((), lambda: None) if self.launch is None else self.launch()
            self.launched = (yield from launched) if isinstance(launched, Generator) else launched
        except Exception as error:
            self.error = error


def until_done(group: GroupContext, work: Any) -> Generator[Any, None, None]:
    """Yield a work, and complete it when the generator is continued; see `Launching`."""
    yield work
    group.wait(work)


def launch_now(launching: Launching) -> Launched:
    """Launch without comparing the members' calls: block wherever the launch waits."""
    while True:
        try:
            next(launching)  # continuing it completes the work that it has yielded
        except StopIteration as end:
            launched: Launched = end.value
            return launched


class Negotiation:
    """The queue of one group's collectives, and its comparison with the queues of the other members.

    Only the group's thread uses it. While a member waits for a collective of this group, it also compares the queues of
    its other groups. Otherwise two members could wait for each other: one may have to finish a collective of another
    group before it calls the one of this group. For the same reason, no comparison blocks the others.
    """

    def __init__(self, group: GroupContext) -> None:
        self._group = group
        self._queue: dict[str, Pending] = {}
        self._numbers: dict[str, int] = {}
        """The number of collectives without a name that were queued, by kind."""
        self._comparison: Generator[Any, None, None] | None = None
        """The comparison in progress; see `_steps`."""
        self._awaited: Any = None
        """The work that it waits for."""
        self._busy = False
        """True while this negotiation launches collectives itself, so that they are not queued behind it."""
        self._waiting = False
        """True while the caller waits for one of the queued collectives."""

    @in_one_thread
    def queue(
        self,
        kind: str,
        name: str | None,
        description: str,
        launch: Callable[[], Launched | Launching] | None,
        problem: str = "",
        detail: str = "",
    ) -> Pending:
        """Add a call, to be launched when it is waited for, or earlier. Raise UsageError if its name is in use."""
        if name is None:
            number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
            key = f"{kind} {number}"
        else:
            key = f"{kind} named {name!r}"
        if key in self._queue:
            raise UsageError(f"{key} is under way already; synchronize it first, or give the second another name")
        pending = Pending(key, description, problem, launch, detail)
        self._queue[key] = pending
        _in_use.add(self)
        return pending

    @in_one_thread
    def launch(self, pending: Pending) -> Launched:
        """Block until all members have called this collective, and launch it. Raise MismatchError if they differ."""
        while pending.launched is None and pending.error is None:
            if pending.key not in self._queue:
                self._group.check_alive()
                raise AssertionError(f"{pending.key} was never launched")
            self._compare()
        if pending.launched is None:
            assert pending.error is not None
            raise pending.error
        return pending.launched

    @in_one_thread
    def settle(self) -> None:
        """Launch all queued collectives, before one that is not queued. Raises as `launch`."""
        while self._queue and not self._busy:
            waiting = list(self._queue.values())
            self._compare()
            for pending in waiting:
                if isinstance(pending.error, SparkElasticError):
                    raise pending.error

    def serve(self, is_over: Callable[[], bool], start: bool = False) -> None:
        """Complete the comparisons that were begun for other groups, before this member blocks, until `is_over()`.

        The other members of those groups then launch the compared collectives. They need slots in shared memory that
        are free only once this member has launched the same collectives, and only then do they come to what this
        member waits for. If `start`, begin comparisons, too, until nothing is queued in another group.
        """
        began, stalled = clock.monotonic(), False
        try:
            while True:
                others = [each for each in _in_use if each is not self and (each._queue if start else each._comparison)]
                if not others or is_over():
                    return
                self._group.check_alive()
                for other in others:
                    if start:
                        other._start()
                    other._is_over()
                if not stalled and clock.monotonic() - began > STALL_S:
                    stalled = True
                    self._group.report_stall(True)
                time.sleep(_PAUSE_S)
        finally:
            if stalled:
                self._group.report_stall(False)

    def reset_numbers(self) -> None:
        """Restart the numbering of calls without a name, when no member has a call in progress."""
        self._numbers.clear()

    def close(self) -> None:
        """End the negotiation, when its group is closed; a wait for a queued collective then raises an error."""
        _in_use.discard(self)

    # --- comparing ----------------------------------------------------------------------------

    def _compare(self) -> None:
        """Compare the queues once, and launch what the members have agreed on."""
        self._waiting = True
        try:
            self._start()
            self.serve(self._is_over, start=True)
            while self._comparison is not None:
                self._continue()
        finally:
            self._waiting = False

    def _start(self) -> None:
        if self._comparison is None:
            self._comparison = self._steps()
            self._continue()

    def _is_over(self) -> bool:
        """Continue the comparison as far as that is possible without waiting; return True if it is over."""
        while self._comparison is not None and self._awaited.is_completed():
            self._continue()
        return self._comparison is None

    def _continue(self) -> None:
        """Wait for what the comparison waits for, and continue it up to its next wait."""
        assert self._comparison is not None
        self._busy = True
        try:
            self._awaited = next(self._comparison)
        except BaseException as error:
            self._comparison = self._awaited = None
            if not isinstance(error, StopIteration):
                raise
        finally:
            self._busy = False

    def _steps(self) -> Generator[Any, None, None]:
        """Compare the queues, and launch the collectives that all members have queued alike, one after another."""
        queued = list(self._queue.values())
        mine = {pending.key: (pending.description, pending.problem) for pending in queued}
        what = _fingerprint(json.dumps(mine))
        detail = _fingerprint(json.dumps([pending.detail for pending in queued]))
        # the maximum of x and of -x shows whether all x are equal; a rank that has joined does not change a maximum
        token = torch.tensor([what, -what, detail, -detail], device="cpu")
        yield from until_done(self._group, self._group.allreduce(token, dist.ReduceOp.MAX))
        most, least, most_detail, least_detail = token.tolist()
        if most == -least:
            for pending in queued:
                pending.alike = most_detail == -least_detail
            agreed = queued
        else:
            agreed = self._resolve((yield from self._exchange_queues(mine)))
        for pending in agreed:
            yield from pending.start()
            del self._queue[pending.key]

    def _exchange_queues(self, queue: dict[str, tuple[str, str]]) -> Generator[Any, None, dict[int, _MemberQueue]]:
        """Return the members' queues, by rank in the group, without the ranks that have joined."""
        group = self._group
        mine = json.dumps(_MemberQueue(self._waiting, self._numbers, queue)).encode()
        sizes = torch.empty(group.size, dtype=torch.int64, device="cpu")
        yield from until_done(group, group.allgather(sizes, torch.tensor([len(mine)], device="cpu")))
        longest = int(sizes.max())
        if longest > _LONGEST_QUEUE_BYTES or int(sizes.min()) < 0:
            raise UsageError(f"more collectives are under way than can be compared ({longest} bytes); synchronize some")
        sent = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8)
        everyone = sent.new_empty((group.size, longest))
        yield from until_done(group, group.allgather(everyone.view(-1), sent))
        return {
            rank: _MemberQueue(*json.loads(row.numpy().tobytes()[:size]))
            for rank, (row, size) in enumerate(zip(everyone, sizes.tolist(), strict=True))
            if size
        }

    def _resolve(self, members: dict[int, _MemberQueue]) -> list[Pending]:
        """Return the collectives that all have queued alike; fail those that they have queued differently."""
        queues = {rank: member.queue for rank, member in members.items()}
        first = next(iter(queues.values()))
        common = [key for key in first if all(key in queue for queue in queues.values())]
        if not common and all(member.waits for member in members.values()):
            self._fail_all(members)
        agreed = []
        for key in common:
            entries = {rank: queue[key] for rank, queue in queues.items()}
            refused = {rank: problem for rank, (_, problem) in entries.items() if problem}
            descriptions = {rank: description for rank, (description, _) in entries.items()}
            if refused:
                error = f"{key} cannot be done: {self._by_rank(refused)}"
            elif len(set(descriptions.values())) > 1:
                shown = self._by_rank(descriptions)
                error = f"ranks call {key} differently: {shown}; types, shapes and settings must be the same"
            else:
                agreed.append(self._queue[key])
                continue
            self._queue.pop(key).error = MismatchError(error)
        return agreed

    def _fail_all(self, members: dict[int, _MemberQueue]) -> None:
        error = MismatchError(
            "ranks wait for collectives that other ranks do not call: "
            + self._by_rank({rank: each.shown() for rank, each in members.items()})
            + "; call the same ones, with the same names and in the same order, on all ranks"
        )
        for pending in self._queue.values():
            pending.error = error
        self._queue.clear()
        for member in members.values():
            for kind, number in member.numbers.items():
                self._numbers[kind] = max(number, self._numbers.get(kind, 0))

    def _by_rank(self, texts: dict[int, str]) -> str:
        ranks: dict[str, list[int]] = {}
        for rank, text in texts.items():
            ranks.setdefault(text, []).append(self._group.world_ranks[rank])
        alike = len(os.path.commonprefix(list(ranks))) if len(ranks) > 1 else 0  # noqa: RUF071  # letters are meant
        start = max(0, alike - _LONGEST_TEXT // 3)
        shown = []
        for text, alike_ranks in list(ranks.items())[:_MOST_VARIANTS]:
            count = len(alike_ranks)
            listed = ", ".join(map(str, alike_ranks[:8])) + (f" and {count - 8} more" if count > 8 else "")
            shown.append(f"{'rank' if count == 1 else 'ranks'} {listed}: {_excerpt(text, start)}")
        return ", ".join(shown) + (f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else "")


class _MemberQueue(NamedTuple):
    """A member's queue: description and problem of each call, by key; `waits`: it waits for one of them."""

    waits: bool
    numbers: dict[str, int]
    queue: dict[str, tuple[str, str]]

    def shown(self) -> str:
        return "; ".join(f"{key} ({about})" if about else key for key, (about, _) in self.queue.items())


_in_use: weakref.WeakSet[Negotiation] = weakref.WeakSet()
"""The negotiations in which a collective was queued."""


def _fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _excerpt(text: str, start: int) -> str:
    """Return the part of a long text from `start` on, where it differs from the others."""
    if len(text) <= _LONGEST_TEXT:
        return text
    end = start + _LONGEST_TEXT
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")

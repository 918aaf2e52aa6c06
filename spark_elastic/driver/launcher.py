"""What the driver asks of whoever starts agents: Spark, or plain processes on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from spark_elastic.errors import ResultError
from spark_elastic.membership.reasons import LossCause, LossKind, reported
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId, WorkerId
from spark_elastic.membership.wording import loss_in_words
from spark_elastic.wire.messages import LoopResult

# What finished workers and finished loops returned.

MAX_LOOP_RESULTS_BYTES = 64 << 20
_NOT_IN_TIME = reported("its slot did not end in time")


class Results:
    """expected: the workers whose results are to come, in rank order; None: the job has not finished."""

    def __init__(self) -> None:
        self.expected: tuple[WorkerId, ...] | None = None
        self._by_worker: dict[WorkerId, bytes] = {}
        self._due_in: dict[SlotId, WorkerId] = {}
        """Whose result each slot is to deliver, once the job is done."""
        self._undelivered: dict[WorkerId, LossCause] = {}
        """Why a result did not come."""

    def expect(self, workers: tuple[WorkerId, ...], slots: Mapping[SlotId, WorkerId]) -> None:
        self.expected = workers
        self._due_in = dict(slots)

    def slot_ended(self, slot: SlotId, cause: LossCause, outcome: AgentOutcome | None) -> None:
        """Keep the result that came with the end of the slot, or why none came."""
        if outcome is not None and outcome.worker is not None and outcome.result is not None:
            self._by_worker[outcome.worker] = outcome.result
        elif slot in self._due_in:
            self._undelivered[self._due_in[slot]] = cause

    def in_rank_order(self) -> list[bytes]:
        """Raises: ResultError: some are missing, or one was larger than Spark takes."""
        assert self.expected is not None
        missing = [worker for worker in self.expected if worker not in self._by_worker]
        if missing:
            raise self._error(self.expected, missing)
        return [self._by_worker[worker] for worker in self.expected]

    def _error(self, expected: tuple[WorkerId, ...], missing: list[WorkerId]) -> ResultError:
        causes = {self._undelivered.get(worker, _NOT_IN_TIME) for worker in missing}
        refused = sorted(cause.detail for cause in causes if cause.kind is LossKind.RESULT_TOO_BIG)
        if refused:
            return ResultError(f"{len(missing)} of {len(expected)} results did not arrive: {refused[0]}")
        reasons = sorted(map(loss_in_words, causes))
        if len(missing) == len(expected):
            return ResultError(
                f"all {len(expected)} workers finished, but none of their results arrived: {'; '.join(reasons)}"
            )
        ranks = ", ".join(str(expected.index(worker)) for worker in missing)
        return ResultError(
            f"all {len(expected)} workers finished, but the results of ranks {ranks} were lost on their way: "
            f"{'; '.join(reasons)}. Run the function again; let it keep what must not be lost in storage"
        )


class LoopResults:
    """What rank 0 offered of the function's finished loops, for newcomers that are sent past them."""

    def __init__(self) -> None:
        self._by_loop: dict[int, LoopResult] = {}
        self._behind: dict[WorkerId, int] = {}
        """Workers on their way to the loop of that number, which may still need a result."""

    def offered(self, result: LoopResult) -> list[WorkerId]:
        """Keep what a loop returned. Returns: who waits for it."""
        total = sum(len(kept.payload) for kept in self._by_loop.values()) + len(result.payload)
        if total > MAX_LOOP_RESULTS_BYTES:
            problem = f"the results of the function's loops are larger than {MAX_LOOP_RESULTS_BYTES >> 20} MiB together"
            result = LoopResult(result.loop, problem, b"")
        self._by_loop[result.loop] = result
        return [worker for worker, loop in self._behind.items() if result.loop < loop]

    def for_newcomer(self, worker: WorkerId, loop: int) -> list[LoopResult]:
        """What a worker needs that is sent on to the loop of that number."""
        if loop > 1:
            self._behind[worker] = loop
        return [result for number, result in sorted(self._by_loop.items()) if number < loop]

    def joined(self, workers: Iterable[WorkerId]) -> None:
        """These are members of a world, and need no more."""
        for worker in workers:
            self._behind.pop(worker, None)


OnEnded = Callable[[SlotId, LossCause, AgentOutcome | None], None]
"""Called from any thread, exactly once for each `launch`, when it is over: the slot, why, and what the agent
returned (None: it was lost, failed, or never began). By then the slot can be launched again."""


class Launcher(Protocol):
    """Starts one agent per slot. No call blocks on a cluster; everything comes back through `OnEnded`."""

    def launch(self, slot: SlotId) -> None:
        """Start the slot's agent.

        Raises:
            ValueError: if the slot's previous launch is not over.
        """
        ...

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        """End the slot's launch, pending or running; nothing if it is over already."""
        ...

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        """An agent has come. Returns: whether it is awaited, or has to go: its launch is over, or told to end."""
        ...

    def agents_joined(self, slots: frozenset[SlotId]) -> None:
        """Which slots have a live agent now; told at each change."""
        ...

    def gone(self) -> str | None:
        """Why nothing can be launched any more, ever; None: it can, as far as is known. Takes a second at most."""
        ...

    def could_not_submit(self, slot: SlotId) -> bool:
        """Whether the slot's last launch failed here, in the driver, before anybody else had a part in it."""
        ...

    def close(self, deadline_s: float) -> None:
        """End everything and wait up to `deadline_s` for it. Later launches end at once. Repeats are harmless."""
        ...

"""The interface to whatever starts agents (Spark, or processes of this machine), and the results that come back by it.

`elastic_driver` uses it; `local_launcher` and `spark.launcher` implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from spark_elastic.errors import ResultError
from spark_elastic.membership.reasons import LossCause, LossKind, loss_in_words, reported
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId, WorkerId
from spark_elastic.wire.messages import LoopResult

MAX_LOOP_RESULTS_BYTES = 64 << 20
_NOT_IN_TIME = reported("its slot did not end in time")


@dataclass(frozen=True, slots=True)
class LaunchEnd:
    """The end of one launch of a slot."""

    slot: SlotId
    cause: LossCause
    outcome: AgentOutcome | None = None
    """What the agent returned; None if it was lost, failed or never began."""
    submitted: bool = True
    """False: the launch failed in the driver itself, before any executor or process was involved."""


OnEnded = Callable[[LaunchEnd], None]
"""Called once for each `Launcher.launch` when that launch is over, from any thread. By then the slot can be launched
again."""


class Launcher(Protocol):
    """Starts one agent per slot. No call blocks on a cluster; the end of each launch is reported to an `OnEnded`."""

    def launch(self, slot: SlotId) -> None:
        """Start the slot's agent.

        Raises:
            ValueError: The slot's previous launch is not over.
        """
        ...

    def withdraw(self, slot: SlotId, cause: LossCause) -> None:
        """End the slot's launch, pending or running. No effect if it is over."""
        ...

    def admit(self, slot: SlotId, launch: LaunchId) -> bool:
        """Return True if an agent that has connected belongs to a current launch; False if it must be sent away."""
        ...

    def agents_joined(self, slots: frozenset[SlotId]) -> None:
        """Take note of the slots that have a live agent now. Called after each change."""
        ...

    def gone(self) -> str | None:
        """Return why nothing can ever be launched again, or None if nothing is known to prevent it.

        Blocks for a second at most.
        """
        ...

    def close(self, deadline_s: float) -> None:
        """End all launches and wait for that up to `deadline_s`. Later launches end at once. May be called again."""
        ...


class WorkerResults:
    """The results of the finished workers, collected as their slots end."""

    def __init__(self) -> None:
        self.expected: tuple[WorkerId, ...] | None = None
        """The workers whose results the job returns, in rank order; None while the job is not finished."""
        self._by_worker: dict[WorkerId, bytes] = {}
        self._due_in: dict[SlotId, WorkerId] = {}
        """The slots that still have to deliver a result of the finished job."""
        self._undelivered: dict[WorkerId, LossCause] = {}
        """Why the slots of these workers ended without delivering a result."""

    def expect(self, workers: tuple[WorkerId, ...], slots: Mapping[SlotId, WorkerId]) -> None:
        self.expected = workers
        self._due_in = dict(slots)

    def slot_ended(self, end: LaunchEnd) -> None:
        """Keep the result that came with the end of a slot, or the cause if it should have come and did not."""
        if end.outcome is not None and end.outcome.worker is not None and end.outcome.result is not None:
            self._by_worker[end.outcome.worker] = end.outcome.result
        elif end.slot in self._due_in:
            self._undelivered[self._due_in[end.slot]] = end.cause

    def in_rank_order(self) -> list[bytes]:
        """Return one pickled result per rank.

        Raises:
            ResultError: Results are missing, or one was larger than Spark accepts.
        """
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
            f"{'; '.join(reasons)}. Run the function again; save to storage what must not be lost"
        )


class LoopResults:
    """Results that rank 0 sent of the function's finished elastic loops, for newcomers that skip those loops."""

    def __init__(self) -> None:
        self._by_loop: dict[int, LoopResult] = {}
        self._behind: dict[WorkerId, int] = {}
        """Newcomers that may still need results, with the loop that each of them is to join."""

    def offered(self, result: LoopResult) -> list[WorkerId]:
        """Keep the result of a loop. Returns the newcomers to send it to."""
        total = sum(len(kept.payload) for kept in self._by_loop.values()) + len(result.payload)
        if total > MAX_LOOP_RESULTS_BYTES:
            problem = f"the results of the function's loops are larger than {MAX_LOOP_RESULTS_BYTES >> 20} MiB together"
            result = LoopResult(result.loop, problem, b"")
        self._by_loop[result.loop] = result
        return [worker for worker, loop in self._behind.items() if result.loop < loop]

    def for_newcomer(self, worker: WorkerId, loop: int) -> list[LoopResult]:
        """Return the results of the loops before `loop`, which the worker is to join."""
        if loop > 1:
            self._behind[worker] = loop
        return [result for number, result in sorted(self._by_loop.items()) if number < loop]

    def joined(self, workers: Iterable[WorkerId]) -> None:
        """Stop collecting results for workers that are members of a world now."""
        for worker in workers:
            self._behind.pop(worker, None)

"""The results of a job: those of its workers, and those of finished elastic loops for newcomers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from spark_elastic.errors import ResultError
from spark_elastic.membership.launcher import LaunchEnd
from spark_elastic.membership.reasons import LossCause, LossKind, loss_in_words, reported
from spark_elastic.membership.topology import SlotId, WorkerId
from spark_elastic.wire.messages import LoopResult

MAX_LOOP_RESULTS_BYTES = 64 << 20


class JobResults:
    """The results of the finished workers, collected as their slots end."""

    def __init__(self) -> None:
        self.expected: tuple[WorkerId, ...] | None = None  # in rank order; None while the job is not finished
        self._by_worker: dict[WorkerId, bytes] = {}
        self._due_in: dict[SlotId, WorkerId] = {}  # the slots that still have to deliver a result of the finished job
        self._undelivered: dict[WorkerId, LossCause] = {}  # why the slots ended that delivered no result

    def expect(self, workers: tuple[WorkerId, ...], slots: Mapping[SlotId, WorkerId]) -> None:
        self.expected = workers
        self._due_in = dict(slots)

    def slot_ended(self, end: LaunchEnd) -> None:
        """Keep the result that a slot delivered at its end or, if it was due and is missing, the cause of the end."""
        if end.outcome is not None and end.outcome.worker is not None and end.outcome.result is not None:
            self._by_worker[end.outcome.worker] = end.outcome.result
        elif end.slot in self._due_in:
            self._undelivered[self._due_in[end.slot]] = end.cause

    def in_rank_order(self) -> list[bytes]:
        """Return one pickled result per rank. Raise ResultError if some are missing, or too large for Spark."""
        expected = self.expected
        assert expected is not None
        missing = [worker for worker in expected if worker not in self._by_worker]
        if not missing:
            return [self._by_worker[worker] for worker in expected]
        late = reported("its slot did not end in time")
        causes = {self._undelivered.get(worker, late) for worker in missing}
        refused = sorted(cause.detail for cause in causes if cause.kind is LossKind.RESULT_TOO_BIG)
        if refused:
            raise ResultError(f"{len(missing)} of {len(expected)} results did not arrive: {refused[0]}")
        reasons = sorted(map(loss_in_words, causes))
        if len(missing) == len(expected):
            raise ResultError(
                f"all {len(expected)} workers finished, but none of their results arrived: {'; '.join(reasons)}"
            )
        ranks = ", ".join(str(expected.index(worker)) for worker in missing)
        raise ResultError(
            f"all {len(expected)} workers finished, but the results of ranks {ranks} were lost on their way: "
            f"{'; '.join(reasons)}. Run the function again; save to storage what must not be lost"
        )


class LoopResults:
    """The results of finished elastic loops, as rank 0 sent them, for newcomers that skip those loops."""

    def __init__(self) -> None:
        self._by_loop: dict[int, LoopResult] = {}
        self._behind: dict[WorkerId, int] = {}  # newcomers that may need results, and the loop that each is to join

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

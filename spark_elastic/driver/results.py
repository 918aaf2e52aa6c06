"""What the finished workers of a job returned, as it comes in through the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from spark_elastic.core.outcome import AgentOutcome
from spark_elastic.core.topology import SlotId, WorkerId
from spark_elastic.driver.spark_reasons import TOO_BIG
from spark_elastic.errors import ResultError


class Results:
    """expected: the workers whose results are to come, in rank order; None: the job has not finished."""

    def __init__(self) -> None:
        self.expected: tuple[WorkerId, ...] | None = None
        self._by_worker: dict[WorkerId, bytes] = {}
        self._due_in: dict[SlotId, WorkerId] = {}
        """Whose result each slot is to deliver, once the job is done."""
        self._undelivered: dict[WorkerId, str] = {}
        """Why a result did not come."""

    def expect(self, workers: tuple[WorkerId, ...], slots: Mapping[SlotId, WorkerId]) -> None:
        self.expected = workers
        self._due_in = dict(slots)

    def slot_ended(self, slot: SlotId, why: str, outcome: AgentOutcome | None) -> WorkerId | None:
        """Returns: the worker whose result came with the end of the slot; None: none did."""
        if outcome is not None and outcome.worker is not None and outcome.result is not None:
            self._by_worker[outcome.worker] = outcome.result
            return outcome.worker
        if slot in self._due_in:
            self._undelivered[self._due_in[slot]] = why
        return None

    def complaint(self) -> str:
        """How many are missing of those expected, and why; empty: none is.

        Raises: ResultError: all are missing, or one was larger than Spark takes.
        """
        assert self.expected is not None
        missing = [worker for worker in self.expected if worker not in self._by_worker]
        reasons = sorted({self._undelivered.get(worker, "its slot did not end in time") for worker in missing})
        refused = [reason for reason in reasons if reason.startswith(TOO_BIG)]
        if refused:
            raise ResultError(f"{len(missing)} of {len(self.expected)} results did not arrive: {refused[0]}")
        if len(missing) == len(self.expected):
            raise ResultError(
                f"all {len(self.expected)} workers finished, but none of their results arrived: {'; '.join(reasons)}"
            )
        return f"{len(missing)} of {len(self.expected)} results are lost: {'; '.join(reasons)}" if missing else ""

    def in_rank_order(self) -> list[bytes]:
        assert self.expected is not None
        return [self._by_worker[worker] for worker in self.expected if worker in self._by_worker]

"""The body of a slot's task: it runs an agent, whose outcome comes back in several rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spark_elastic.membership.reasons import LossKind
from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import LaunchId, SlotId

AgentEntry = Callable[..., AgentOutcome]
"""Runs in the task, called with `(slot, launch, payload)`, and with what all slots share as the fourth argument, if
anything. It is pickled by reference, so its module must be importable on the executors."""


def agent_task(
    agent: AgentEntry,
    slot: SlotId,
    launch: LaunchId,
    payload: bytes,
    *,
    shared: Any = None,
    once: bool = False,
) -> Callable[[Any], Any]:
    """Return the function that Spark runs. It is pickled by value, so it must not use names of this module.

    The arguments of `agent` are `slot`, `launch`, `payload` and, if there is one, the value of the broadcast variable
    `shared`. With `once` the Python worker ends with this task.
    """

    def task(_rows: Any) -> Any:
        import itertools

        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            # Spark's own second attempt. The driver starts the slot again itself, so return, which ends the job.
            return [None]
        if once:
            # The last number that a Python worker writes after a task lets Spark keep it for another one. With this
            # other number Spark closes it.
            from pyspark import worker

            write_int, lengths = worker.write_int, worker.SpecialLengths

            def write(value: int, stream: Any) -> None:
                write_int(lengths.END_OF_DATA_SECTION if value == lengths.END_OF_STREAM else value, stream)

            worker.write_int = write
        outcome = agent(slot, launch, payload, *([] if shared is None else [shared.value]))
        # The driver fetches each row in one piece, so a large result is cut. A Spark Connect server cuts no row itself,
        # and puts at most 4 MiB into a message.
        result, step = outcome.result or b"", 1 << 20
        pieces = (result[at : at + step] for at in range(0, len(result), step))
        first = (outcome.worker, outcome.result is not None, outcome.why, outcome.kind.name)
        return itertools.chain([first], pieces)

    return task


def outcome_of(rows: list[Any]) -> AgentOutcome | None:
    """Return the outcome in the rows of a task; None if its first attempt was lost and Spark ran it again."""
    if not rows or rows[0] is None:
        return None
    worker, has_result, why, kind = rows[0]
    return AgentOutcome(worker, b"".join(rows[1:]) if has_result else None, why, LossKind[kind])

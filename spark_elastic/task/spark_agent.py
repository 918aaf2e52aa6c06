"""The agent as the body of a Spark task: what the Spark launcher runs on executors."""

from __future__ import annotations

import dataclasses
import pickle

from spark_elastic.core.outcome import AgentOutcome
from spark_elastic.core.topology import LaunchId, SlotId
from spark_elastic.task.agent import run_agent
from spark_elastic.task.executor_process import jvm_pid_in_task
from spark_elastic.task.spark_task import slot_report
from spark_elastic.wire.handover import AgentOrder


def run_in_task(slot: SlotId, launch: LaunchId, payload: bytes, function: bytes | None = None) -> AgentOutcome:
    """Run the agent of a slot.

    Args:
        payload: a pickled `AgentOrder`, which Spark's own serialisation brought here.
        function: the order's, if it came by another way.
    """
    order: AgentOrder = pickle.loads(payload)
    if function is not None:
        order = dataclasses.replace(order, function=function)
    return run_agent(order, slot, launch, slot_report(), jvm_pid_in_task())

"""The agent as the body of a Spark task: what the Spark launcher runs on executors."""

from __future__ import annotations

import pickle

from spark_elastic.core.outcome import AgentOutcome
from spark_elastic.core.topology import SlotId
from spark_elastic.task.agent import run_agent
from spark_elastic.task.spark_task import jvm_pid_in_task, slot_report


def run_in_task(slot: SlotId, payload: bytes) -> AgentOutcome:
    """Run the agent of a slot. `payload`: a pickled `AgentOrder`, which Spark's own serialisation brought here."""
    return run_agent(pickle.loads(payload), slot, slot_report(), jvm_pid_in_task())

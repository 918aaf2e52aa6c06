"""An agent that a test can hold between the begin of its Spark task and its first word to the driver."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from spark_elastic.membership.states import AgentOutcome
from spark_elastic.membership.topology import SlotId
from spark_elastic.task import spark_agent
from tests.integration.processes import wait_until
from tests.integration.spark.diary import WAIT_S

_POLL_S = 0.005


def run_held(folder: str, slot: SlotId, *order: Any) -> AgentOutcome:
    """Stands in for `spark_agent.run_in_task`: waits while its file is in `folder`, and leaves its last words there."""
    held = Path(folder, f"held-{slot}-{os.getpid()}")
    if Path(folder, "hold").exists():
        held.touch()
    while held.exists():
        time.sleep(_POLL_S)
    outcome = spark_agent.run_in_task(slot, *order)
    being_written = Path(folder, f"writes-{slot}-{os.getpid()}")
    being_written.write_text(outcome.why)
    being_written.rename(Path(folder, f"ended-{slot}-{os.getpid()}"))
    return outcome


def wait_for_one(folder: Path, pattern: str) -> Path:
    """The one file that fits, once it is there."""
    wait_until(lambda: list(folder.glob(pattern)), WAIT_S, f"a file {pattern}")
    (found,) = folder.glob(pattern)
    return found

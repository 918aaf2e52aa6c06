"""What an agent's run comes to."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.core.topology import WorkerId


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """What the agent's entry function returns from its task (or its process).

    `worker` and `result` are None unless the agent delivers the result of a finished worker; `result` is what the
    worker pickled, untouched. `why` says in words how the agent's run ended.
    """

    worker: WorkerId | None
    result: bytes | None
    why: str

"""Reasons as data: why something was lost, why the world changes, what the job waits for.

The machine's commands, records and errors carry these values. `membership.wording` makes sentences of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class LossKind(enum.Enum):
    """The ways in which a worker, its agent or its slot ends. In brackets: the fields of `LossCause` that are set."""

    EXITED = enum.auto()  # the process ended by itself or was killed [code; detail: Spark's words for it]
    CONNECTION_CLOSED = enum.auto()  # [detail: how it was closed]
    PROTOCOL_BROKEN = enum.auto()  # it sent a message that is not for it to send
    SILENT = enum.auto()  # no heartbeat [seconds]
    UNRESPONSIVE = enum.auto()  # no heartbeat although its agent sees the process run [seconds]
    NOT_READY = enum.auto()  # it did not get ready within start_timeout [seconds]
    NOT_BACK = enum.auto()  # it did not come back from a broken world within stall_timeout [seconds]
    BLOCKED_OTHERS = enum.auto()  # the others have waited for it in a collective for stall_timeout [seconds]
    AGENT_LOST = enum.auto()  # [because]
    AGENT_EXITED = enum.auto()  # the local agent's process ended [code]
    AGENT_REPLACED = enum.auto()  # a newer agent has its slot
    TASK_ENDED = enum.auto()  # [because]
    TASK_REMAINS = enum.auto()  # the agent is gone, and its task does not end
    NOT_LAUNCHED = enum.auto()  # an agent came for a slot that is not launched [name: of the slot]
    EXECUTOR_LOST = enum.auto()  # [name; because]
    EXECUTOR_UNLISTED = enum.auto()  # Spark no longer lists the executor
    DECOMMISSIONED = enum.auto()  # Spark takes the executor away [name]
    HOST_FULL = enum.auto()  # more agents than the host may use [name: of the host; count: of slots]
    HOST_NOT_ALLOWED = enum.auto()  # [name: of the host; detail: the allowed ones]
    HOST_EXCLUDED = enum.auto()  # worlds in a row crashed on the host [name; count: of worlds]
    ABANDONED = enum.auto()  # the function gave up its world [detail: the worker's words]
    PLAIN_FUNCTION = enum.auto()  # its world broke, and a function without an elastic loop starts over
    PROCESS_ENDED = enum.auto()  # its world broke after its function had returned and its process had ended
    RESULT_TOO_BIG = enum.auto()  # Spark refused a result [detail: Spark's words]
    UNEXPLAINED = enum.auto()  # Spark's words tell how the loss was noticed, not what it was [detail]
    REPORTED = enum.auto()  # [detail: the words of whoever reported it]


_SYMPTOMS = {
    LossKind.CONNECTION_CLOSED,
    LossKind.PROTOCOL_BROKEN,
    LossKind.EXECUTOR_UNLISTED,
    LossKind.UNEXPLAINED,
}
_BEYOND_THE_WORKER = {LossKind.AGENT_LOST, LossKind.TASK_ENDED, LossKind.EXECUTOR_LOST, LossKind.DECOMMISSIONED}


@dataclass(frozen=True, slots=True)
class LossCause:
    """Why a worker, an agent or a slot's launch is over. Also why one is ended on purpose."""

    kind: LossKind
    code: int | None = None
    """Exit code; negative: killed by that signal."""
    seconds: float = 0.0
    name: str = ""
    count: int = 0
    detail: str = ""
    """Words of others: Spark, the operating system, the user's code. Shown, never interpreted."""
    because: LossCause | None = None

    @property
    def root(self) -> LossCause:
        """The innermost cause: the event itself, without the chain of things that were lost with it."""
        return self if self.because is None else self.because.root

    @property
    def is_symptom(self) -> bool:
        """True if it tells only how the loss was noticed; the cause itself often arrives a moment later."""
        return self.root.kind in _SYMPTOMS

    @property
    def reaches_beyond_the_worker(self) -> bool:
        """True if the agent, its task or its executor is gone too."""
        return self.kind in _BEYOND_THE_WORKER


def reported(words: str) -> LossCause:
    """Return a cause that is known only in the words of whoever reported it."""
    return LossCause(LossKind.REPORTED, detail=words)


class WorldChangeKind(enum.Enum):
    """The reasons to build another world. In brackets: the fields of `WorldChange` that are set."""

    JOB_STARTS = enum.auto()
    STARTED_OVER = enum.auto()  # no worker holds a state, and no step was applied yet [before]
    GATHERED = enum.auto()  # enough workers are ready [before; have, want, need; seconds: the grace, if not all came]
    NEWCOMERS = enum.auto()  # [have: how many]
    LEAVING = enum.auto()  # a member's slot is not to be used any more [cause]
    MEMBER_LOST = enum.auto()  # [rank, host, cause]
    COLLECTIVE_FAILED = enum.auto()  # [rank, host]
    ALL_BLOCKED = enum.auto()  # all members wait in a collective [have: how many; seconds]
    NO_STEP = enum.auto()  # the members were asked to stop and applied no step [seconds]
    NOT_STOPPED = enum.auto()  # some members did not stop where the others did [have: how many]
    RESULTS_GONE = enum.auto()  # the agents that held the results are gone


@dataclass(frozen=True, slots=True)
class WorldChange:
    """Why the present world ends and the next one is built."""

    kind: WorldChangeKind
    have: int = 0
    want: int = 0
    need: int = 0
    seconds: float = 0.0
    rank: int | None = None
    host: str = ""
    cause: LossCause | None = None
    before: WorldChange | None = None


class WaitKind(enum.Enum):
    """What a job waits for. In brackets: the fields of `Wait` that are set, besides `left_s`."""

    MINIMUM = enum.auto()  # workers for the first world [have, want, need; missing]
    GRACE = enum.auto()  # enough workers are ready; the wanted others may still come [have, want; missing]
    REPLACEMENTS = enum.auto()  # the survivors are too few and keep their state [have, need; missing]
    RETRY = enum.auto()  # a pause: worlds in a row broke before a step, no worker lost [have: how many; missing]
    AGREEMENT = enum.auto()  # the members train on until they agree on a step to stop at [have: how many; change]
    STOP = enum.auto()  # the other members stop at the agreed step [have: how many; change]
    SURVIVORS = enum.auto()  # survivors of a broken world come back [have: how many; round, ranks, finishing]
    CAUSE = enum.auto()  # every holder of the state is gone; how it went arrives a moment later
    SLOTS = enum.auto()  # task slots of the cluster [have, need]
    FREE_SLOTS = enum.auto()  # task slots that are free at the same time [need]
    REPORTED = enum.auto()  # [detail: the words of whoever waits]


@dataclass(frozen=True, slots=True)
class Wait:
    """What the job waits for. Two waits that differ only in the time that is left are equal."""

    kind: WaitKind
    have: int = 0
    want: int = 0
    need: int = 0
    left_s: float = field(default=0.0, compare=False)
    """How long it was to be waited at most when it was announced."""
    missing: tuple[LossCause, ...] = ()
    """Why launches ended before their agent joined, the most frequent causes first."""
    change: WorldChange | None = None
    round: int = 0
    ranks: tuple[int, ...] = ()
    """The ranks that are waited for; empty if there are too many to name."""
    finishing: int = 0
    """Survivors that run the code after their loop, and are waited for longer."""
    detail: str = ""

"""Reasons as data, and the sentences about them: why something was lost, why the world changes, what the job waits for.

The machine's commands, records and errors carry the data, and code that needs to know a reason looks at the data. The
functions at the end are the only place where it becomes words, for people.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_elastic.errors import UnequalStepsError, exit_in_words, unequal_steps_in_words


class LossKind(enum.Enum):
    """The ways in which a worker, its agent or its slot ends. In brackets: the fields of `LossCause` that are set."""

    EXITED = enum.auto()  # the process ended by itself or was killed [code; detail: Spark's words for it]
    DYING = enum.auto()  # the process dies; its exit is reported next [code: of that exit; None: not known yet]
    CONNECTION_CLOSED = enum.auto()  # [detail: how it was closed]
    PROTOCOL_BROKEN = enum.auto()  # it sent a message that only others may send
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
    WORLD_RESTARTS = enum.auto()  # with restart="world", all workers start again
    PLAIN_FUNCTION = enum.auto()  # its world broke, and a function without an elastic loop starts over
    PROCESS_ENDED = enum.auto()  # its world broke after its function had returned and its process had ended
    RESULT_TOO_BIG = enum.auto()  # Spark refused a result [detail: Spark's words]
    UNEXPLAINED = enum.auto()  # Spark's words tell how the loss was noticed, not what it was [detail]
    UNREACHABLE = enum.auto()  # the agent could not connect to the driver [detail: the addresses and errors]
    CANCELLED = enum.auto()  # Spark's job of the slot was cancelled, not by this package [detail: Spark's words]
    REPORTED = enum.auto()  # [detail: the words of whoever reported it]


_SYMPTOMS = {
    LossKind.DYING,
    LossKind.CONNECTION_CLOSED,
    LossKind.PROTOCOL_BROKEN,
    LossKind.EXECUTOR_UNLISTED,
    LossKind.UNEXPLAINED,
}
_BEYOND_THE_WORKER = {LossKind.AGENT_LOST, LossKind.TASK_ENDED, LossKind.EXECUTOR_LOST, LossKind.DECOMMISSIONED}


@dataclass(frozen=True, slots=True)
class LossCause:
    """The reason why a worker, an agent or a slot's launch ended, or is ended on purpose."""

    kind: LossKind
    code: int | None = None  # exit code; negative: killed by that signal
    seconds: float = 0.0
    name: str = ""
    count: int = 0
    detail: str = ""  # words of others: Spark, the operating system, the user's code. Shown, never interpreted
    because: LossCause | None = None

    @property
    def root(self) -> LossCause:
        """The innermost cause of the chain: the event that led to all the other losses."""
        return self if self.because is None else self.because.root

    @property
    def is_symptom(self) -> bool:
        """True if the cause only tells how the loss was noticed. The real cause is often reported a moment later."""
        return self.root.kind in _SYMPTOMS

    @property
    def reaches_beyond_the_worker(self) -> bool:
        """True if the agent, its task or its executor is gone too."""
        return self.kind in _BEYOND_THE_WORKER


def reported(words: str) -> LossCause:
    """Return a cause that is known only as a sentence of Spark, of an agent or of a launcher."""
    return LossCause(LossKind.REPORTED, detail=words)


class WorldChangeKind(enum.Enum):
    """The reasons to build another world. In brackets: the fields of `WorldChange` that are set."""

    JOB_STARTS = enum.auto()
    STARTED_OVER = enum.auto()  # no worker holds a state, and no step was applied yet [before]
    RESTARTED = enum.auto()  # with restart="world": all workers start again [before]
    GATHERED = enum.auto()  # enough workers are ready [before; have, want, need; seconds: the grace, if not all came]
    NEWCOMERS = enum.auto()  # [have: how many]
    LEAVING = enum.auto()  # a member's slot is not to be used any more [cause]
    MEMBER_LOST = enum.auto()  # [rank, host, cause]
    COLLECTIVE_FAILED = enum.auto()  # [rank, host]
    ADDRESS_LOST = enum.auto()  # [rank, host]
    ALL_BLOCKED = enum.auto()  # all members wait in a collective [have: how many; seconds; unequal, if some have left]
    NO_STEP = enum.auto()  # the members were asked to stop and applied no step [seconds]
    NOT_STOPPED = enum.auto()  # some members did not stop where the others did [have: how many]
    RESULTS_GONE = enum.auto()  # the agents that held the results are gone


@dataclass(frozen=True, slots=True)
class WorldChange:
    """The reason why the present world ends and the next one is built."""

    kind: WorldChangeKind
    have: int = 0
    want: int = 0
    need: int = 0
    seconds: float = 0.0
    unequal: UnequalStepsError | None = None  # the error, should it come back
    rank: int | None = None
    host: str = ""
    cause: LossCause | None = None
    before: WorldChange | None = None


class WaitKind(enum.Enum):
    """The things that a job waits for. In brackets: the fields of `Wait` that are set, besides `left_s`."""

    MINIMUM = enum.auto()  # workers for the first world [have, want, need; missing]
    GRACE = enum.auto()  # enough workers are ready; the wanted others may still come [have, want; missing]
    REPLACEMENTS = enum.auto()  # the survivors are too few and keep their state [have, need; missing]
    RETRY = enum.auto()  # a pause: worlds in a row broke before a step, no worker lost [have: how many; missing]
    AGREEMENT = enum.auto()  # the members train on until they agree on a step to stop at [have: how many; change]
    STOP = enum.auto()  # the other members stop at the agreed step [have: how many; change]
    END = enum.auto()  # with restart="world", the members were asked to end [have: how many; change]
    SURVIVORS = enum.auto()  # survivors of a broken world come back [have: how many; round, ranks, finishing]
    CAUSE = enum.auto()  # every holder of the state is gone; how it went arrives a moment later
    SLOTS = enum.auto()  # task slots of the cluster [have, need]
    FREE_SLOTS = enum.auto()  # task slots that are free at the same time [need]
    REPORTED = enum.auto()  # [detail: the words of whoever waits]


EXACT_COUNTS = 16  # the largest count of workers of which every change is announced


@dataclass(frozen=True, slots=True)
class Wait:
    """A description of what the job waits for. Two waits that differ only in the time that is left are equal."""

    kind: WaitKind
    have: int = 0
    want: int = 0
    need: int = 0
    left_s: float = field(default=0.0, compare=False)  # how long it was to be waited at most when it was announced
    missing: tuple[LossCause, ...] = ()  # why launches ended before their agent joined, the most frequent causes first
    change: WorldChange | None = None
    round: int = 0
    ranks: tuple[int, ...] = ()  # the ranks that are waited for; empty if there are too many to name
    finishing: int = 0  # survivors that run the code after their loop, and are waited for longer
    detail: str = ""

    def is_much_like(self, other: Wait) -> bool:
        """Return True if the two are equal but for the time that is left, or for counts that differ by less than a
        quarter and are larger than `EXACT_COUNTS`.
        """
        if self.have == other.have and self.finishing == other.finishing:
            return self == other
        for mine, theirs in ((self.have, other.have), (self.finishing, other.finishing)):
            if mine != theirs and (min(mine, theirs) <= EXACT_COUNTS or 4 * abs(mine - theirs) >= max(mine, theirs)):
                return False
        return self == replace(other, have=self.have, finishing=self.finishing)


# --- sentences -------------------------------------------------------------------------------------

_LOSSES = {
    LossKind.CONNECTION_CLOSED: "its connection closed ({cause.detail})",
    LossKind.PROTOCOL_BROKEN: "it broke the protocol",
    LossKind.SILENT: "silent for {cause.seconds:g} s",
    LossKind.UNRESPONSIVE: "silent for {cause.seconds:.0f} s, longer than stall_timeout, although its process runs",
    LossKind.NOT_READY: "not ready within start_timeout ({cause.seconds:g} s)",
    LossKind.NOT_BACK: "did not come to the next round within stall_timeout ({cause.seconds:g} s)",
    LossKind.BLOCKED_OTHERS: "the others have waited for it in a collective for stall_timeout ({cause.seconds:g} s)",
    LossKind.AGENT_LOST: "its agent is lost: {because}",
    LossKind.AGENT_REPLACED: "a newer agent has its slot",
    LossKind.TASK_ENDED: "its task ended: {because}",
    LossKind.TASK_REMAINS: "its agent is gone and its task does not end",
    LossKind.NOT_LAUNCHED: "slot {cause.name} is not launched",
    LossKind.EXECUTOR_LOST: "executor {cause.name} is lost: {because}",
    LossKind.EXECUTOR_UNLISTED: "Spark no longer lists it",
    LossKind.DECOMMISSIONED: "executor {cause.name} is being decommissioned",
    LossKind.HOST_NOT_ALLOWED: "host {cause.name} is not among the hosts to use ({cause.detail})",
    LossKind.PLAIN_FUNCTION: "its world broke, and a plain function can only be run again from the start",
    LossKind.WORLD_RESTARTS: "all workers start again",
    LossKind.PROCESS_ENDED: "its world broke after its function had returned and its process had ended",
}


def loss_in_words(cause: LossCause) -> str:
    """Describe a loss with its whole chain of causes, outermost first."""
    match cause.kind:
        case LossKind.EXITED:
            return cause.detail or _exit(cause.code or 0)
        case LossKind.DYING:
            return "its process died" if cause.code is None else _exit(cause.code)
        case LossKind.AGENT_EXITED:
            return f"its agent {exit_in_words(cause.code or 0)}"
        case LossKind.HOST_FULL:
            return f"host {cause.name} may use {counted(cause.count, 'slot')}"
        case LossKind.HOST_EXCLUDED:
            return f"host {cause.name} is left alone: {crashes_in_words(cause.count)}"
        case _:
            because = "" if cause.because is None else loss_in_words(cause.because)
            return _LOSSES.get(cause.kind, "{cause.detail}").format(cause=cause, because=because)


def _exit(code: int) -> str:
    if code == 0:
        return "exited with code 0 before the function was finished"
    return exit_in_words(code).removeprefix("was ")


def crashes_in_words(worlds: int) -> str:
    """Describe why a host is excluded."""
    return f"{worlds} worlds in a row crashed there" if worlds != 1 else "a world crashed there"


def hosts_in_words(slots: Mapping[str, int]) -> str:
    """Describe the slots of hosts, such as "h1:2, h2:4"; of many hosts, the first eight."""
    shown = [f"{host}:{count}" for host, count in slots.items()]
    return ", ".join([*shown[:8], *(["..."] if len(shown) > 8 else [])]) or "none"


def missing_in_words(causes: Sequence[LossCause]) -> str:
    """Describe why slots have no agent; empty if no launch has failed."""
    if not causes:
        return ""
    return "launches ended before their agent joined: " + "; ".join(dict.fromkeys(map(loss_in_words, causes)))


_CHANGES = {
    WorldChangeKind.JOB_STARTS: "the job starts",
    WorldChangeKind.STARTED_OVER: "starting over, no worker held a state ({before})",
    WorldChangeKind.RESTARTED: "all workers start again: {before}",
    WorldChangeKind.NEWCOMERS: "{change.have} more ready to train",
    WorldChangeKind.LEAVING: "{cause}",
    WorldChangeKind.MEMBER_LOST: "rank {change.rank} on {change.host} is gone: {cause}",
    WorldChangeKind.COLLECTIVE_FAILED: "a collective failed for rank {change.rank} on {change.host}",
    WorldChangeKind.ADDRESS_LOST: "the network interface of rank {change.rank} on {change.host} is gone",
    WorldChangeKind.NO_STEP: "no step in {change.seconds:g} s since the workers were asked to stop",
    WorldChangeKind.RESULTS_GONE: "the agents that held the results are gone",
}


def change_in_words(change: WorldChange) -> str:
    """Describe why a world ended or the next one is built."""
    before = "" if change.before is None else change_in_words(change.before)
    cause = "" if change.cause is None else loss_in_words(change.cause)
    match change.kind:
        case WorldChangeKind.GATHERED if change.have >= change.want:
            return f"{before}: {counted(change.have, 'worker')} ready, {change.want} wanted"
        case WorldChangeKind.GATHERED:
            enough = f"{change.need} {'is' if change.need == 1 else 'are'} enough"
            some = f"{change.have} of {counted(change.want, 'worker')}"
            return f"{before}: {some} ready after a grace of {change.seconds:g} s; {enough}"
        case WorldChangeKind.ALL_BLOCKED if change.unequal is not None:
            return unequal_steps_in_words(change.unequal.left, change.unequal.waiting, change.unequal.step)
        case WorldChangeKind.ALL_BLOCKED:
            members = "the only member has" if change.have == 1 else f"all {change.have} members have"
            return f"{members} waited in a collective for {change.seconds:g} s"
        case WorldChangeKind.NOT_STOPPED:
            return f"{counted(change.have, 'worker')} did not stop at the step where the others did"
        case _:
            return _CHANGES[change.kind].format(change=change, before=before, cause=cause)


def wait_in_words(wait: Wait) -> str:
    """Describe what the job waits for, how long it may take, and why slots are missing."""
    return "; ".join(filter(None, [_wait(wait), missing_in_words(wait.missing)]))


def _wait(wait: Wait) -> str:
    change = "" if wait.change is None else change_in_words(wait.change)
    wanted = f"{wait.have} of {counted(wait.want, 'worker')} ready"
    up_to = f"waiting up to {wait.left_s:.0f} s"
    match wait.kind:
        case WaitKind.MINIMUM:
            return f"{wanted}; {up_to} for at least {wait.need}"
        case WaitKind.GRACE:
            return f"{wanted}; {up_to} more for the others"
        case WaitKind.REPLACEMENTS:
            needed = f"{wait.have} of at least {counted(wait.need, 'worker')} ready"
            return f"{needed}; keeping {'its' if wait.have == 1 else 'their'} state and {up_to}"
        case WaitKind.RETRY:
            return (
                f"{worlds_in_words(wait.have)} broke before a step, with no worker lost; "
                f"trying again in {wait.left_s:.1f} s"
            )
        case WaitKind.AGREEMENT if wait.have == 1:
            return f"1 worker trains on until it reaches a step to stop at ({change})"
        case WaitKind.AGREEMENT:
            return f"{wait.have} workers train on until they agree on a step to stop at ({change})"
        case WaitKind.STOP:
            return f"waiting for {counted(wait.have, 'more worker')} to stop at the agreed step ({change})"
        case WaitKind.END:
            return f"{counted(wait.have, 'worker')} got SIGTERM, to save and end ({change})"
        case WaitKind.SURVIVORS:
            return f"round {wait.round} broke; {up_to} for {counted(wait.have, 'survivor')}{_survivors(wait)}"
        case WaitKind.CAUSE:
            return "every worker that held the state is gone; waiting for why"
        case WaitKind.SLOTS:
            return f"{wait.have} of {counted(wait.need, 'slot')}; {up_to} for more executors"
        case WaitKind.FREE_SLOTS:
            return f"{up_to} for {counted(wait.need, 'slot')} to be free together"
        case WaitKind.REPORTED:
            return wait.detail


def wait_on_bar(wait: Wait) -> str:
    """Describe a wait for a progress bar: what is missing comes first, and the bar itself shows the time."""
    match wait.kind:
        case WaitKind.MINIMUM:
            words = f"waiting for {wait.want - wait.have} of {counted(wait.want, 'worker')}"
            words += f" ({wait.need} would do)" if wait.need < wait.want else ""
        case WaitKind.GRACE:
            words = f"waiting for {wait.want - wait.have} of {counted(wait.want, 'worker')}; the others are ready"
        case WaitKind.REPLACEMENTS:
            words = f"waiting for {wait.need - wait.have} of {counted(wait.need, 'worker')}, keeping the state"
        case WaitKind.SLOTS:
            words = f"waiting for {wait.need - wait.have} of {counted(wait.need, 'slot')}"
        case WaitKind.FREE_SLOTS:
            words = f"waiting for {counted(wait.need, 'slot')} to be free together"
        case WaitKind.SURVIVORS:
            words = f"waiting for {wait.have} to come back from the broken round{_survivors(wait)}"
        case _:
            return wait_in_words(wait)
    return "; ".join(filter(None, [words, missing_in_words(wait.missing)]))


def _survivors(wait: Wait) -> str:
    """Describe the survivors that the job waits for, as the end of a sentence; empty if they are too many to name."""
    words = ""
    if wait.ranks:
        words = f" (rank{'s' if len(wait.ranks) > 1 else ''} {', '.join(map(str, wait.ranks))})"
    if wait.finishing:
        which = "which" if wait.have == 1 else f"{wait.finishing} of which"
        runs, is_waited = ("runs", "is") if wait.finishing == 1 else ("run", "are")
        words += f", {which} {runs} the code after the loop and {is_waited} waited for longer"
    return words


def failures_in_words(failures: int, pause_s: float) -> str:
    """Describe how often a slot, executor or host failed, and how long it is not used."""
    times = "once" if failures == 1 else f"{failures} times"
    return f"failed {times} and rests for {pause_s:.1f} s"


def worlds_in_words(count: int) -> str:
    """Describe a number of consecutive worlds, such as "2 worlds in a row"."""
    return "1 world" if count == 1 else f"{count} worlds in a row"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun in the right form: "1 worker", "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

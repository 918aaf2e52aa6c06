"""Every error that spark_elastic raises; docs/errors.md lists them with causes and remedies.

`UsageError`: the call, its data or a folder has to change. `JobError`: the job ran and could not continue. Inside a
worker, `elastic.run` handles `HorovodInternalError` and `HostsUpdatedInterrupt`. All errors can be pickled.
"""

from __future__ import annotations

import copyreg
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from spark_elastic.helper_thread import HelperThread
from spark_elastic.redaction import redacted


class SparkElasticError(Exception):
    """Base of every error of this package.

    A subclass with numbers is a dataclass: it takes them as keyword arguments and builds its message from them in
    `words`. Fields, and other keyword arguments, are also attributes, and pickling restores all. Credentials in the
    message are redacted.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        self.message = redacted(message)
        super().__init__(self.message)
        self.__dict__.update(fields)

    def __post_init__(self) -> None:
        SparkElasticError.__init__(self, self.words(), **{each.name: getattr(self, each.name) for each in fields(self)})  # type: ignore[arg-type]

    def words(self) -> str:
        """Return the message of an error that is a dataclass."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # not by the constructor: that of a dataclass takes no message
        return (copyreg.__newobj__, (type(self), self.message), self.__dict__)  # type: ignore[attr-defined]


# --- the call needs a change ---------------------------------------------------------------------


class UsageError(SparkElasticError, ValueError):
    """The call, its data or a folder has to change: repeated as it is, the call fails again."""


class InvalidSettingsError(UsageError):
    """A setting has an impossible value, or two settings contradict each other."""


class UnsupportedOperationError(UsageError, NotImplementedError):
    """The collective does not exist here, or not for this kind of tensor."""


@dataclass(kw_only=True, eq=False, repr=False)
class MissingExtraError(UsageError, ImportError):
    """A package that an optional extra installs is missing."""

    what: str
    package: str
    extra: str

    def words(self) -> str:
        return (
            f"{self.what} needs {self.package}, which is not installed here: install it, or spark-elastic with the "
            f"extra [{self.extra}], on the executors too"
        )


class NotPicklableError(UsageError):
    """The function, its arguments or its result cannot be serialised."""


class NoSparkContextError(UsageError):
    """There is no active SparkContext to run in."""


@dataclass(kw_only=True, eq=False, repr=False)
class DriverUnreachableError(UsageError):
    """Executors cannot connect to the driver program at any of its addresses."""

    addresses: tuple[str, ...]  # those that they tried
    port: int
    tried: str

    def words(self) -> str:
        return (
            f"executors cannot connect back to this program: {self.tried}. It listens on port {self.port}; let "
            "executors reach that on this machine (firewall, VPN, container ports), name the address at which they "
            "reach it (driver_host=), or run this program near the cluster (spark-submit, a notebook on the cluster)"
        )


class JavaNotFoundError(UsageError):
    """Spark needs a Java runtime, and none was found."""


PYTHON_SETTING = "PYSPARK_PYTHON in this program's environment (spark.pyspark.python acts with spark-submit alone)"
"""The setting for the Python of the executors, in words for messages; Spark Connect has another."""


@dataclass(kw_only=True, eq=False, repr=False)
class ExecutorPythonError(UsageError):
    """Spark's executors run another Python than this program, and workers cannot run in it."""

    theirs: str  # the Python of the executors
    ours: str  # the Python of this program
    problem: str  # why theirs cannot run workers
    version: str  # minor version of ours, which theirs needs as well
    on_connect: bool = False  # the session is one of Spark Connect, whose server chooses the executors' Python

    def words(self) -> str:
        where = f"the session starts, set {PYTHON_SETTING},"
        if self.on_connect:
            where = "Spark Connect's server starts, set its PYSPARK_PYTHON"
        return (
            f"Spark's executors run {self.theirs}, and {self.problem}; this program runs {self.ours}. Before {where} "
            f"to a Python {self.version} that has the same packages on every machine, or install them into the "
            "executors' Python"
        )


class UnknownInterfaceError(UsageError):
    """A network interface in ``nics`` does not exist, or is down, on a host that needs it."""


class PortsTakenError(UsageError):
    """The port that a setting gives, or each port of its range, is in use."""


class DiscoveryScriptError(UsageError):
    """The host discovery script is missing, not executable, or failed on its first call."""


class DataError(UsageError):
    """A column is missing, has a type that cannot be stored, or holds values that cannot be trained on."""


class DatasetError(UsageError):
    """A materialised dataset is missing, incomplete, damaged, or was not written by this package."""


class StoreError(UsageError):
    """A store cannot be used from a machine that needs it."""


class CheckpointError(UsageError):
    """A checkpoint or a saved model is missing, incomplete, damaged, or belongs to another run or estimator."""


class RunTakenError(CheckpointError):
    """Another driver trains in this run's folder, or has taken the folder over from this driver."""


class NotInitializedError(UsageError):
    """A function that needs `init()` was called before it."""


@dataclass(kw_only=True, eq=False, repr=False)
class StateNotMovableError(UsageError):
    """The `sync` of a user-defined state broadcasts values without `bcast_object`."""

    kind: str

    def words(self) -> str:
        return (
            f"the world broke after the elastic loop, and the function was called again; but {self.kind}.sync() does "
            "not broadcast its values with self._bcast_object, so they cannot be restored from the state of the "
            "earlier call. Use self._bcast_object in sync(), or a state of this package (ObjectState, TorchState, "
            "KerasState, TensorFlowState)"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class LoopResultError(UsageError):
    """A newcomer cannot get the return value of an elastic loop that ended before it joined."""

    loop: int
    reason: str

    def words(self) -> str:
        return (
            f"this worker joined after elastic loop {self.loop} had ended, and cannot get its return value: "
            f"{self.reason}. Return a small value that can be pickled, or None, from each loop that another loop "
            "follows"
        )


class MismatchError(UsageError, RuntimeError):
    """Ranks called different collectives, or one collective with different arguments; every rank raises it."""


class OutsideLoopError(UsageError):
    """A newcomer called a collective before it became a member of the running world."""


# --- the job ran and could not continue ----------------------------------------------------------


class JobError(SparkElasticError):
    """The job ran and could not continue."""


@dataclass(kw_only=True, eq=False, repr=False)
class NotEnoughSlotsError(JobError):
    """Fewer slots than needed were available for longer than the timeout allows."""

    have: int  # slots that were available
    need: int
    waited_s: float
    setting: str  # the name of the timeout
    detail: str = ""  # more about the cluster
    fixed: str = ""  # the name of a cluster that can never have more slots
    unreachable: bool = False  # slots are missing because executors cannot connect to this program

    def words(self) -> str:
        message = (
            f"{self.have} of {self.need} slots were available after {self.waited_s:.0f} s; add executors, lower "
            f"min_num_proc (now {self.need}) or raise {self.setting}"
        )
        if self.fixed:
            noun = "slot" if self.have == 1 else "slots"
            message = (
                f"{self.need} slots are needed, and {self.fixed} has {self.have} {noun} and can never have more; lower "
                f"min_num_proc (now {self.need}, which is num_proc where it is not given), or start the session with "
                "more cores"
            )
        if self.unreachable:
            message = (
                f"{self.have} of {self.need} slots were available after {self.waited_s:.0f} s, because executors "
                "cannot connect to this program; let them reach this machine (firewall, VPN, driver_port), or set "
                "spark.driver.host to an address at which they do"
            )
        return message + (f". {self.detail}" if self.detail else "")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


@dataclass(kw_only=True, eq=False, repr=False)
class LaunchError(JobError):
    """The driver cannot launch any slot: each launch failed twice before it left the driver."""

    reason: str

    def words(self) -> str:
        return (
            f"no slot can be launched, each failed twice in the driver itself: {self.reason}; look at the driver's "
            "disk, memory and descriptors (spark.local.dir, ulimit)"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class ResetLimitError(JobError):
    """The world would have to be rebuilt more often than ``reset_limit`` allows."""

    resets: int  # rebuilds, including the one that the limit prevented
    limit: int
    last_reason: str  # why the last rebuild was needed

    def words(self) -> str:
        return (
            f"the world would have to be rebuilt for the {_ordinal(self.resets)} time and reset_limit is {self.limit} "
            f"(last: {self.last_reason}); raise reset_limit, or look into why workers are lost"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class StateLostError(JobError):
    """No surviving worker holds the training state."""

    progress: int
    last_reason: str
    cancelled: bool = False

    def words(self) -> str:
        remedy = "spread the workers over more hosts"
        if self.cancelled:
            remedy = "leave its Spark jobs alone (cancelAllJobs, the UI); cancel() of a run_async job ends it in order"
        return (
            f"every worker that held the state is gone (last reported step: {self.progress}; last loss: "
            f"{self.last_reason}); start again from a checkpoint, and {remedy}"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class RepeatedCrashError(JobError):
    """Several worlds in a row lost a process at the same step."""

    #: The step that no world completed; if `after_loop`, the last step of the loop that they had left; None: unknown,
    #: because workers report no steps with restart="world".
    step: int | None
    worlds: int
    crashes: tuple[tuple[int, str, int], ...]  # rank, host and exit code (negative: a signal), oldest first
    after_loop: bool = False  # the processes ended after the elastic loop
    memory: str = ""  # the kernel's kills for lack of memory where they ran
    stderr_tail: str = ""  # the last lines of the last process's stderr

    def words(self) -> str:
        where = f"at step {self.step}, before that step was applied"
        if self.after_loop:
            where = f"after the loop of {self.step} steps"
        if self.step is None:
            where = "(the later ones within stall_timeout of their start)"
        each = "; ".join(f"rank {rank} on {host} {exit_in_words(code)}" for rank, host, code in self.crashes)
        return (
            f"the last {self.worlds} worlds each lost a process {where}: {each}. "
            + (f"{self.memory}. " if self.memory else "")
            + "Starting them again does not help: look for the row, the call or the lack of memory that ends them "
            "there, or raise crash_limit (None: try for ever)"
            + (f". The end of the last one's stderr:\n{self.stderr_tail}" if self.stderr_tail else "")
        )


@dataclass(kw_only=True, eq=False, repr=False)
class UnequalStepsError(JobError):
    """Some ranks have left the collectives that the others wait in, in one world after the other."""

    left: tuple[int, ...]  # the ranks that have left the loop, or whose function has returned
    waiting: tuple[int, ...]
    step: int | None  # the last step of the loop that was applied; None: the others wait in no elastic loop

    def words(self) -> str:
        return (
            f"{unequal_steps_in_words(self.left, self.waiting, self.step)}: call `hvd.join()` on a rank that has no "
            "more data, have all ranks make equal steps, or decide together when to stop (an allreduce of each rank's "
            "wish)"
        )


def unequal_steps_in_words(left: Sequence[int], waiting: Sequence[int], step: int | None) -> str:
    """Describe which ranks have left the collectives that others wait in; see `UnequalStepsError`."""
    have, wait = "has" if len(left) == 1 else "have", "waits" if len(waiting) == 1 else "wait"
    where = "returned" if step is None else f"left the loop after step {step}"
    what = "a collective" if step is None else f"a reduction of step {step + 1}"
    return f"{_ranks_in_words(left)} {have} {where}, {_ranks_in_words(waiting)} {wait} in {what}"


def _ranks_in_words(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def exit_in_words(code: int) -> str:
    """Describe an exit code as Popen returns it, such as "was killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


@dataclass(kw_only=True, eq=False, repr=False)
class SessionLostError(JobError):
    """The SparkContext was stopped, or its JVM died, while the job ran."""

    reason: str
    progress: int | None

    def words(self) -> str:
        return (
            f"{self.reason} while the job ran, and its workers ended with it (last reported step: "
            f"{self.progress or 0}); keep the session until the job is over"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class WorkerStartError(JobError):
    """Worker processes exited before they could join the job."""

    attempts: int
    reason: str
    stderr_tail: str = ""

    def words(self) -> str:
        tail = f"; the end of its stderr:\n{self.stderr_tail}" if self.stderr_tail else ""
        return f"{self.attempts} worker processes in a row exited before they could join (last: {self.reason}){tail}"


@dataclass(kw_only=True, eq=False, repr=False)
class UserFunctionError(JobError):
    """The user's function raised. The message ends with the frames of the function in the worker."""

    rank: int | None
    host: str
    error_type: str
    error: str
    traceback: str  # the whole text that Python would have printed, with the frames that the message shows
    exit_code: int | None = None  # the code that a script exited with; None: it raised something else

    def words(self) -> str:
        who = "a worker that had no rank yet" if self.rank is None else f"rank {self.rank}"
        said = f"{self.error_type}: {self.error}".rstrip() if self.error else self.error_type
        frames = self.traceback.rstrip()
        if frames.endswith(said):  # the last line repeats it, after the module of the class
            frames = re.sub(r"[\w.<>]*\Z", "", frames.removesuffix(said)).rstrip()
        return f"{who} on {self.host} raised {said}\n\n{frames}\n"


class ResultError(JobError):
    """A worker finished, but its return value could not be sent to the driver."""


@dataclass(kw_only=True, eq=False, repr=False)
class LossNotFiniteError(JobError):
    """The loss of an estimator's training is NaN or infinite, or a trained weight is NaN."""

    loss: float | None  # over all workers; None: the loss was finite, and a weight is NaN after the last step
    step: int  # optimizer steps so far, including this one
    epoch: int  # from 0, as in a history
    ranks: tuple[int, ...]  # the workers whose loss over their own rows was not finite; () if each alone was finite
    size: int  # number of workers
    checkpoints: str = ""  # folder of the checkpoints before this step

    def words(self) -> str:
        what = f"the loss of step {self.step} is {self.loss}"
        if self.loss is None:
            what = "a weight is NaN after the last step"
        whose = f", on the rows of rank {', '.join(map(str, self.ranks))} of {self.size} workers" if self.ranks else ""
        return (
            f"{what} (step {self.step}, in epoch {self.epoch + 1}{whose}). Look for a learning rate that is too high "
            "(lower it, or set gradient_clip_norm), log, sqrt or a division in the loss or the model, labels that the "
            "loss does not know, what transformation_fn returns, and half precision. allow_nan_loss=True trains on "
            "regardless" + (f". The checkpoints before it are in {self.checkpoints}" if self.checkpoints else "")
        )


class JobCancelledError(JobError):
    """The job was cancelled before it finished."""


# --- the wire -----------------------------------------------------------------------------------


class ProtocolError(SparkElasticError):
    """A peer sent something the wire protocol does not allow; its connection is closed."""


class AuthenticationError(ProtocolError):
    """The peer does not hold this job's key, or a frame was altered in transit."""


@dataclass(kw_only=True, eq=False, repr=False)
class FrameTooLargeError(ProtocolError):
    """A frame announces more bytes than the limit; nothing was allocated for it."""

    size: int
    limit: int

    def words(self) -> str:
        return f"a frame of {self.size} bytes was announced; the limit is {self.limit}"


class ChannelClosedError(ProtocolError):
    """The connection to the other side is gone."""


# --- inside a worker ----------------------------------------------------------------------------


class HorovodInternalError(SparkElasticError, RuntimeError):
    """A collective failed because a peer is gone or was cut off. ``elastic.run`` recovers from it."""

    last_message: ClassVar[str | None] = None  # since a loop called its function; not of a `HelperThread`

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        if not isinstance(threading.current_thread(), HelperThread):
            HorovodInternalError.last_message = message


class HostsUpdatedInterrupt(SparkElasticError):
    """The world is about to change; every member raises this at the same commit or check.

    ``skip_sync`` exists for code written for Horovod and has no effect: the new world decides if a sync is needed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of workers is about to change", skip_sync=skip_sync)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most like `name`, for "did you mean"; None if none is similar."""
    import difflib

    folded = {each.casefold(): each for each in known}  # "EPOCHS" means "epochs"
    matches = difflib.get_close_matches(name.casefold(), folded, n=1)
    return folded[matches[0]] if matches else None

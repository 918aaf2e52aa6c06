"""Every error that spark_elastic raises; docs/errors.md lists them with causes and remedies.

- `UsageError`: the call needs a change, nothing was run.
- `JobError`: the job ran and could not continue.
- `ProtocolError`: a peer broke the wire protocol.
- `HorovodInternalError` and `HostsUpdatedInterrupt`: signals inside a worker, which `elastic.run` handles.

All of them survive a pickle round trip, so they can travel from an executor to the driver.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

from spark_elastic.redaction import redacted


class SparkElasticError(Exception):
    """Base of every error of this package.

    A subclass with numbers takes them as keyword arguments and builds its message from them. They are also attributes,
    and pickling restores both. Credentials in the message are redacted.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        self.message = redacted(message)
        super().__init__(self.message)
        self._fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self._fields))


def _rebuild(cls: type[SparkElasticError], message: str, fields: dict[str, Any]) -> SparkElasticError:
    error = cls.__new__(cls)
    SparkElasticError.__init__(error, message, **fields)
    return error


# --- the call needs a change ---------------------------------------------------------------------


class UsageError(SparkElasticError, ValueError):
    """The call itself has to change; nothing was run."""


class InvalidSettingsError(UsageError):
    """A setting has an impossible value, or two settings contradict each other."""


class UnsupportedOperationError(UsageError, NotImplementedError):
    """The collective does not exist here, or not for this kind of tensor."""


class MissingExtraError(UsageError, ImportError):
    """A package that an optional extra installs is missing."""

    def __init__(self, *, what: str, package: str, extra: str) -> None:
        super().__init__(
            f'{what} needs {package}, which is not installed here: pip install "spark-elastic[{extra}]" (on the '
            "executors too)",
            what=what,
            package=package,
            extra=extra,
        )


class NotPicklableError(UsageError):
    """The function, its arguments or its result cannot be serialised."""


class NoSparkContextError(UsageError):
    """There is no active SparkContext to run in."""


class DriverUnreachableError(UsageError):
    """Executors cannot connect to the driver program at any of its addresses.

    Attributes:
        addresses: The addresses that they tried.
    """

    def __init__(self, *, addresses: tuple[str, ...], port: int, tried: str) -> None:
        super().__init__(
            f"executors cannot connect back to this program: {tried}. It listens on port {port}; let executors reach "
            "that on this machine (firewall, VPN, container ports), name the address at which they reach it "
            "(driver_host=), or run this program near the cluster (spark-submit, a notebook on the cluster)",
            addresses=addresses,
            port=port,
            tried=tried,
        )


class JavaNotFoundError(UsageError):
    """Spark needs a Java runtime, and none was found."""


PYTHON_SETTING = "PYSPARK_PYTHON in this program's environment (spark.pyspark.python acts with spark-submit alone)"
"""The setting for the Python of the executors, in words for messages; Spark Connect has another."""


class ExecutorPythonError(UsageError):
    """Spark's executors run another Python than this program, and workers cannot run in it.

    Attributes:
        theirs: the Python of the executors.
        ours: the Python of this program.
        problem: why theirs cannot run workers.
        version: minor version of ours, which theirs needs as well.
        on_connect: whether the session is one of Spark Connect, whose server chooses the executors' Python.
    """

    def __init__(self, *, theirs: str, ours: str, problem: str, version: str, on_connect: bool = False) -> None:
        where = f"the session starts, set {PYTHON_SETTING},"
        if on_connect:
            where = "Spark Connect's server starts, set its PYSPARK_PYTHON"
        super().__init__(
            f"Spark's executors run {theirs}, and {problem}; this program runs {ours}. Before {where} to a Python "
            f"{version} that has the same packages on every machine, or install them into the executors' Python",
            theirs=theirs,
            ours=ours,
            problem=problem,
            version=version,
            on_connect=on_connect,
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


class StateNotMovableError(UsageError):
    """The `sync` of a user-defined state broadcasts values without `bcast_object`."""

    def __init__(self, *, kind: str) -> None:
        super().__init__(
            f"the world broke after the elastic loop, and the function was called again; but {kind}.sync() does not "
            "broadcast its values with self._bcast_object, so they cannot be restored from the state of the earlier "
            "call. Use self._bcast_object in sync(), or a state of this package (ObjectState, TorchState, KerasState, "
            "TensorFlowState)",
            kind=kind,
        )


class LoopResultError(UsageError):
    """A newcomer cannot get the return value of an elastic loop that ended before it joined."""

    def __init__(self, *, loop: int, reason: str) -> None:
        super().__init__(
            f"this worker joined after elastic loop {loop} had ended, and cannot get its return value: {reason}. "
            "Return a small value that can be pickled, or None, from each loop that another loop follows",
            loop=loop,
            reason=reason,
        )


class MismatchError(UsageError, RuntimeError):
    """Ranks called different collectives, or one collective with different arguments; every rank raises it."""


class OutsideLoopError(UsageError):
    """A newcomer called a collective before it became a member of the running world."""


# --- the job ran and could not continue ----------------------------------------------------------


class JobError(SparkElasticError):
    """The job ran and could not continue."""


class NotEnoughSlotsError(JobError):
    """Fewer slots than needed were available for longer than the timeout allows.

    Attributes:
        have: slots that were available.
        need: slots that are needed.
        waited_s: seconds waited.
        setting: name of the timeout.
        detail: more about the cluster.
        fixed: name of a cluster that can never have more slots; "" if it might.
        unreachable: whether slots are missing because executors cannot connect to this program.
    """

    def __init__(
        self,
        *,
        have: int,
        need: int,
        waited_s: float,
        setting: str,
        detail: str = "",
        fixed: str = "",
        unreachable: bool = False,
    ) -> None:
        message = (
            f"{have} of {need} slots were available after {waited_s:.0f} s; add executors, lower "
            f"min_num_proc (now {need}) or raise {setting}"
        )
        if fixed:
            noun = "slot" if have == 1 else "slots"
            message = (
                f"{need} slots are needed, and {fixed} has {have} {noun} and can never have more; lower min_num_proc "
                f"(now {need}, which is num_proc where it is not given), or start the session with more cores"
            )
        if unreachable:
            message = (
                f"{have} of {need} slots were available after {waited_s:.0f} s, because executors cannot connect to "
                "this program; let them reach this machine (firewall, VPN, driver_port), or set spark.driver.host to "
                "an address at which they do"
            )
        super().__init__(
            message + (f". {detail}" if detail else ""),
            have=have,
            need=need,
            waited_s=waited_s,
            setting=setting,
            detail=detail,
            fixed=fixed,
            unreachable=unreachable,
        )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


class LaunchError(JobError):
    """The driver cannot launch any slot: each launch failed twice before it left the driver."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(
            f"no slot can be launched, each failed twice in the driver itself: {reason}; look at the driver's disk, "
            "memory and descriptors (spark.local.dir, ulimit)",
            reason=reason,
        )


class ResetLimitError(JobError):
    """The world would have to be rebuilt more often than ``reset_limit`` allows.

    Attributes:
        resets: number of rebuilds, including the one that the limit prevented.
        limit: the value of ``reset_limit``.
        last_reason: why the last rebuild was needed.
    """

    def __init__(self, *, resets: int, limit: int, last_reason: str) -> None:
        super().__init__(
            f"the world would have to be rebuilt for the {_ordinal(resets)} time and reset_limit is {limit} "
            f"(last: {last_reason}); "
            "raise reset_limit, or look into why workers are lost",
            resets=resets,
            limit=limit,
            last_reason=last_reason,
        )


class StateLostError(JobError):
    """No surviving worker holds the training state."""

    def __init__(self, *, progress: int, last_reason: str, cancelled: bool = False) -> None:
        remedy = "spread the workers over more hosts"
        if cancelled:
            remedy = "leave its Spark jobs alone (cancelAllJobs, the UI); cancel() of a run_async job ends it in order"
        super().__init__(
            f"every worker that held the state is gone (last applied step: {progress}; last loss: {last_reason}); "
            f"start again from a checkpoint, and {remedy}",
            progress=progress,
            last_reason=last_reason,
            cancelled=cancelled,
        )


class RepeatedCrashError(JobError):
    """Several worlds in a row lost a process at the same step.

    Attributes:
        step: the step that no world completed; if `after_loop`, the last step of the loop that they had left.
        worlds: number of worlds.
        crashes: rank, host and exit code of each process, oldest first; a negative code is a signal.
        after_loop: True if the processes ended after the elastic loop.
        memory: the kernel's kills for lack of memory where they ran; "" if there were none.
        stderr_tail: the last lines of the last process's stderr.
    """

    def __init__(
        self,
        *,
        step: int,
        worlds: int,
        crashes: Sequence[tuple[int, str, int]],
        after_loop: bool = False,
        memory: str = "",
        stderr_tail: str = "",
    ) -> None:
        where = f"after the loop of {step} steps" if after_loop else f"at step {step}, before that step was applied"
        each = "; ".join(f"rank {rank} on {host} {exit_in_words(code)}" for rank, host, code in crashes)
        super().__init__(
            f"the last {worlds} worlds each lost a process {where}: {each}. "
            + (f"{memory}. " if memory else "")
            + "Starting them again does not help: look for the row, the call or the lack of memory that ends them "
            "there, or raise crash_limit (None: try for ever)"
            + (f". The end of the last one's stderr:\n{stderr_tail}" if stderr_tail else ""),
            step=step,
            worlds=worlds,
            crashes=tuple(crashes),
            after_loop=after_loop,
            memory=memory,
            stderr_tail=stderr_tail,
        )


class UnequalStepsError(JobError):
    """Some ranks have left the collectives that the others wait in, in one world after the other.

    Attributes:
        left: the ranks that have left the loop, or whose function has returned.
        waiting: the ranks that wait.
        step: the last step of the loop that was applied; None: the others wait in no elastic loop.
    """

    def __init__(self, *, left: Sequence[int], waiting: Sequence[int], step: int | None) -> None:
        super().__init__(
            f"{unequal_steps_in_words(left, waiting, step)}: call `hvd.join()` on a rank that has no more data, have "
            "all ranks make equal steps, or decide together when to stop (an allreduce of each rank's wish)",
            left=tuple(left),
            waiting=tuple(waiting),
            step=step,
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


class SessionLostError(JobError):
    """The SparkContext was stopped, or its JVM died, while the job ran."""

    def __init__(self, *, reason: str, progress: int | None) -> None:
        super().__init__(
            f"{reason} while the job ran, and its workers ended with it (last applied step: {progress or 0}); keep the "
            "session until the job is over",
            reason=reason,
            progress=progress,
        )


class WorkerStartError(JobError):
    """Worker processes exited before they could join the job."""

    def __init__(self, *, attempts: int, reason: str, stderr_tail: str = "") -> None:
        super().__init__(
            f"{attempts} worker processes in a row exited before they could join (last: {reason})"
            + (f"; the end of its stderr:\n{stderr_tail}" if stderr_tail else ""),
            attempts=attempts,
            reason=reason,
            stderr_tail=stderr_tail,
        )


class UserFunctionError(JobError):
    """The user's function raised. The message ends with the frames of the function in the worker.

    `traceback`: the whole text that Python would have printed, with the frames that the message shows.

    `exit_code`: the code that a script exited with; None: it raised something else.
    """

    def __init__(
        self,
        *,
        rank: int | None,
        host: str,
        error_type: str,
        error: str,
        traceback: str,
        exit_code: int | None = None,
    ) -> None:
        who = "a worker that had no rank yet" if rank is None else f"rank {rank}"
        said = f"{error_type}: {error}".rstrip() if error else error_type
        frames = traceback.rstrip()
        if frames.endswith(said):  # the last line repeats it, after the module of the class
            frames = re.sub(r"[\w.<>]*\Z", "", frames.removesuffix(said)).rstrip()
        super().__init__(
            f"{who} on {host} raised {said}\n\n{frames}\n",
            rank=rank,
            host=host,
            error_type=error_type,
            error=error,
            traceback=traceback,
            exit_code=exit_code,
        )


class ResultError(JobError):
    """A worker finished, but its return value could not be sent to the driver."""


class LossNotFiniteError(JobError):
    """The loss of an estimator's training is NaN or infinite, or a trained weight is NaN.

    Attributes:
        loss: over all workers; None if the loss was finite and a weight is NaN after the last step.
        step: optimizer steps so far, including this one.
        epoch: from 0, as in a history.
        ranks: the workers whose loss over their own rows was not finite; () if each alone was finite.
        size: number of workers.
        checkpoints: folder of the checkpoints before this step; "" without checkpoints.
    """

    def __init__(
        self, *, loss: float | None, step: int, epoch: int, ranks: Sequence[int], size: int, checkpoints: str = ""
    ) -> None:
        what = "a weight is NaN after the last step" if loss is None else f"the loss of step {step} is {loss}"
        whose = f", on the rows of rank {', '.join(map(str, ranks))} of {size} workers" if ranks else ""
        super().__init__(
            f"{what} (step {step}, in epoch {epoch + 1}{whose}). Look for a learning rate that is too high (lower it, "
            "or set gradient_clip_norm), log, sqrt or a division in the loss or the model, labels that the loss does "
            "not know, what transformation_fn returns, and half precision. allow_nan_loss=True trains on regardless"
            + (f". The checkpoints before it are in {checkpoints}" if checkpoints else ""),
            loss=loss,
            step=step,
            epoch=epoch,
            ranks=tuple(ranks),
            size=size,
            checkpoints=checkpoints,
        )


class JobCancelledError(JobError):
    """The job was cancelled before it finished."""


# --- the wire -----------------------------------------------------------------------------------


class ProtocolError(SparkElasticError):
    """A peer sent something the wire protocol does not allow; its connection is closed."""


class AuthenticationError(ProtocolError):
    """The peer does not hold this job's key, or a frame was altered in transit."""


class FrameTooLargeError(ProtocolError):
    """A frame announces more bytes than the limit; nothing was allocated for it."""

    def __init__(self, *, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size} bytes was announced; the limit is {limit}", size=size, limit=limit)


class ChannelClosedError(ProtocolError):
    """The connection to the other side is gone."""


# --- inside a worker ----------------------------------------------------------------------------


class HorovodInternalError(SparkElasticError, RuntimeError):
    """A collective failed because a peer is gone or was cut off. ``elastic.run`` recovers from it."""

    newest: ClassVar[str | None] = None
    """The message of the newest one since an elastic loop last called its function, which may have caught it."""

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        HorovodInternalError.newest = message


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

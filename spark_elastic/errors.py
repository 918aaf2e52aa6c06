"""Every error that spark_elastic raises.

::

    SparkElasticError
    ├── UsageError                   your call needs a change; nothing was run        (also a ValueError)
    │   ├── InvalidSettingsError       a value, or two that contradict each other
    │   ├── UnsupportedOperationError  no such collective for this kind of tensor          (also a NotImplementedError)
    │   ├── NotPicklableError          the function, its arguments or its result
    │   ├── NoSparkContextError        no active SparkContext
    │   ├── SparkConnectNotSupportedError
    │   ├── JavaNotFoundError
    │   ├── UnknownInterfaceError      a name in nics= that a host does not have
    │   ├── DiscoveryScriptError       the host discovery script cannot be used
    │   ├── DataError                  a column is missing, or holds what cannot be trained on
    │   ├── DatasetError               a materialised set is missing, incomplete, damaged or foreign
    │   ├── StoreError                 storage that the driver and all executors do not share
    │   ├── CheckpointError            a checkpoint or saved model cannot be used
    │   │   └── RunTakenError            another driver has the run, or has taken it over
    │   ├── MissingExtraError          a package of an optional extra is missing          (also an ImportError)
    │   ├── NotInitializedError        hvd.init() has not been called
    │   ├── StateNotMovableError       the sync of a state of your own goes past bcast_object
    │   ├── LoopResultError            a newcomer cannot have the result of a loop that is over
    │   ├── MismatchError              ranks called different collectives                (also a RuntimeError)
    │   └── OutsideLoopError           a newcomer sent rows to other ranks before it entered the elastic loop
    ├── JobError                     the job ran and could not go on
    │   ├── NotEnoughSlotsError        fewer slots than needed for too long
    │   ├── LaunchError                the driver itself cannot launch anything
    │   ├── ResetLimitError            the world changed more often than reset_limit
    │   ├── StateLostError             every worker that held the state is gone
    │   ├── RepeatedCrashError         one world after another loses a process at the same step
    │   ├── SessionLostError           the SparkContext was stopped, or its JVM is gone
    │   ├── WorkerStartError           workers exit before they can join
    │   ├── UserFunctionError          your function raised; carries its traceback
    │   ├── ResultError                a result could not be brought back
    │   ├── LossNotFiniteError         the loss, or a trained weight, of a fit is NaN or infinite
    │   └── JobCancelledError          handle.cancel(), Ctrl-C, or the notebook's Cancel
    ├── ProtocolError                a peer broke the wire protocol
    │   ├── AuthenticationError
    │   ├── FrameTooLargeError
    │   └── ChannelClosedError
    ├── HorovodInternalError         a collective failed: a peer is gone         (also a RuntimeError)
    └── HostsUpdatedInterrupt        the world is about to change, at an agreed step

All of them survive a pickle round trip, so they can cross from an executor to the driver.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any


class SparkElasticError(Exception):
    """Base of every error of this package.

    Subclasses take keyword arguments only and build their message from them, so the numbers in the
    message are also attributes, and pickling restores both.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
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


# --- your call needs a change -------------------------------------------------------------------


class UsageError(SparkElasticError, ValueError):
    """The call itself has to change; nothing was run."""


class InvalidSettingsError(UsageError):
    """A setting has an impossible value, or two settings contradict each other."""


class UnsupportedOperationError(UsageError, NotImplementedError):
    """There is no such collective here, or not for this kind of tensor."""


class MissingExtraError(UsageError, ImportError):
    """A package is needed that only comes with an optional extra of this one."""

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


class SparkConnectNotSupportedError(UsageError):
    """A Spark Connect session has no scheduler on this side to run workers with."""


class JavaNotFoundError(UsageError):
    """Spark needs a Java runtime and none was found."""


class UnknownInterfaceError(UsageError):
    """A network interface in ``nics`` does not exist, or is down, on a host that needs it."""


class DiscoveryScriptError(UsageError):
    """The host discovery script is missing, not executable, or failed on its first call."""


class DataError(UsageError):
    """A column is missing, has a type that cannot be stored, or holds values that cannot be trained on."""


class DatasetError(UsageError):
    """A materialised set is missing, incomplete, damaged, or was not written by this package."""


class StoreError(UsageError):
    """A storage location cannot be used from where it is needed."""


class CheckpointError(UsageError):
    """A checkpoint or a saved model is missing, incomplete, damaged, or belongs to something else."""


class RunTakenError(CheckpointError):
    """Another driver trains in this run's folder, or has taken it over from this one."""


class NotInitializedError(UsageError):
    """A function that needs `init()` was called before it."""


class StateNotMovableError(UsageError):
    """A state of your own has a `sync` whose broadcasts do not go through `bcast_object`."""

    def __init__(self, *, kind: str) -> None:
        super().__init__(
            f"the world broke after the elastic loop, and the function was called again; but {kind}.sync() does not "
            "broadcast its values with self._bcast_object, so they cannot be taken from the state before. Use "
            "self._bcast_object in sync(), or a state that brings its own (ObjectState, TorchState, KerasState, "
            "TensorFlowState)",
            kind=kind,
        )


class LoopResultError(UsageError):
    """A newcomer cannot have the result of an elastic loop that was over before it came."""

    def __init__(self, *, loop: int, reason: str) -> None:
        super().__init__(
            f"this worker joins a job whose elastic loop {loop} is over, and cannot have what that returned: {reason}. "
            "Return something small that can be pickled, or nothing, from loops that others follow",
            loop=loop,
            reason=reason,
        )


class MismatchError(UsageError, RuntimeError):
    """Ranks have called different collectives, or one collective in different ways; every rank raises it."""


class OutsideLoopError(UsageError):
    """A newcomer that is not yet a member of the running world called a collective that needs the others."""


# --- the job ran and could not go on ------------------------------------------------------------


class JobError(SparkElasticError):
    """The job could not go on."""


class NotEnoughSlotsError(JobError):
    """Fewer slots than needed were available for longer than the timeout allows."""

    def __init__(
        self, *, have: int, need: int, waited_s: float, setting: str, detail: str = "", fixed: str = ""
    ) -> None:
        """fixed: what has no more slots and can never get any; empty: there might have been more."""
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
        super().__init__(
            message + (f". {detail}" if detail else ""),
            have=have,
            need=need,
            waited_s=waited_s,
            setting=setting,
            detail=detail,
            fixed=fixed,
        )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"


class LaunchError(JobError):
    """The driver itself cannot launch anything: each slot was refused twice before anybody else had a part in it."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(
            f"no slot can be launched, each failed twice in the driver itself: {reason}; look at the driver's disk, "
            "memory and descriptors (spark.local.dir, ulimit)",
            reason=reason,
        )


class ResetLimitError(JobError):
    """The world would have to be rebuilt more often than ``reset_limit`` allows.

    `resets`: how often, with the one that was not done any more.
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

    def __init__(self, *, progress: int, last_reason: str) -> None:
        super().__init__(
            f"every worker that held the state is gone (last applied step: {progress}; last loss: {last_reason}); "
            "start again from a checkpoint, and spread the workers over more hosts",
            progress=progress,
            last_reason=last_reason,
        )


class RepeatedCrashError(JobError):
    """One world after another lost a process before one more step was applied.

    `step`: the one that nobody got through; if `after_loop`, the last one of the loop that they had left. `crashes`:
    rank, host and exit code of each process, oldest first; a negative code is a signal. `memory`: what the kernel says
    about memory where they ran, or nothing.
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


def exit_in_words(code: int) -> str:
    """How a process ended, by the code that its parent got: "was killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


class SessionLostError(JobError):
    """Spark itself ended under the job."""

    def __init__(self, *, reason: str, progress: int | None) -> None:
        super().__init__(
            f"{reason} while the job ran, and its workers went with it (last applied step: {progress or 0}); keep the "
            "session until the job is over",
            reason=reason,
            progress=progress,
        )


class WorkerStartError(JobError):
    """Worker processes exit before they can join the job."""

    def __init__(self, *, attempts: int, reason: str, stderr_tail: str = "") -> None:
        super().__init__(
            f"{attempts} worker processes in a row exited before they could join (last: {reason})"
            + (f"; the end of its stderr:\n{stderr_tail}" if stderr_tail else ""),
            attempts=attempts,
            reason=reason,
            stderr_tail=stderr_tail,
        )


class UserFunctionError(JobError):
    """The user's function raised. The message ends with the worker's own traceback.

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
        super().__init__(
            f"{who} on {host} raised {error_type}: {error}\n\n{traceback}",
            rank=rank,
            host=host,
            error_type=error_type,
            error=error,
            traceback=traceback,
            exit_code=exit_code,
        )


class ResultError(JobError):
    """A worker finished but what it returned could not be brought to the driver."""


class LossNotFiniteError(JobError):
    """The loss of an estimator's training is NaN or infinite, or a trained weight is NaN.

    loss: over all workers; None: the loss was finite, and a weight is NaN after the last step. step: optimizer steps so
    far, with this one. epoch: from 0, as in a history. ranks: the workers whose own rows had it; () if none had alone.
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
    """The peer does not hold this job's key, or a frame was altered on the way."""


class FrameTooLargeError(ProtocolError):
    """A frame announces more bytes than the limit; nothing was allocated for it."""

    def __init__(self, *, size: int, limit: int) -> None:
        super().__init__(f"a frame of {size} bytes was announced; the limit is {limit}", size=size, limit=limit)


class ChannelClosedError(ProtocolError):
    """The connection to the other side is gone."""


# --- inside a worker ----------------------------------------------------------------------------


class HorovodInternalError(SparkElasticError, RuntimeError):
    """A collective failed because a peer is gone or was cut off. ``elastic.run`` recovers from it."""


class HostsUpdatedInterrupt(SparkElasticError):
    """The world is about to change; every member raises it at the same commit or check.

    ``skip_sync`` is kept for code written for Horovod. Whether a sync is needed is decided from the
    new membership itself.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of workers is about to change", skip_sync=skip_sync)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name most like `name`, for "did you mean"; None if nothing is close."""
    import difflib

    matches = difflib.get_close_matches(name, known, n=1)
    return matches[0] if matches else None

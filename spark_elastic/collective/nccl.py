"""A NCCL communicator of a round: made, aborted and made anew as the world changes.

NCCL itself waits for a peer that is gone for ever, or for its own time-out, and by default torch then ends the whole
process. So nothing here blocks where it cannot be told to stop: a collective is waited for by looking at it again and
again, and a cut aborts the communicator from another thread, which sets its kernels free. What they leave behind then
is garbage: whoever waited looks whether the round was cut before it believes what it has got.

The watchdog that ends processes is kept from it by the environment that the agent starts workers in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spark_elastic import clock
from spark_elastic.errors import HorovodInternalError

log = logging.getLogger("spark_elastic.collective")

CONNECT_TIMEOUT_S = 60.0
"""The first communicator of a process loads NCCL's kernels, which takes seconds."""
_BACKEND_TIMEOUT = timedelta(days=20)
"""Above any `stall_timeout` that means something: the driver acts first."""
_SPIN_S = 2e-3
"""So long it looks without a pause: gradients of a step are usually done by then."""
_PAUSE_S = 2e-4


class Runtime(Protocol):
    """CUDA and NCCL, as far as they are needed here; tests have one without a GPU."""

    def connect(self, store: Any, rank: int, size: int, device: torch.device) -> Any:
        """A process group whose communicator exists. Blocks until all members have called it."""
        ...

    def mark(self, device: torch.device) -> Any:
        """An event behind everything that the device's current stream has to do; `query()` says whether it is done."""
        ...


class CudaRuntime:
    """The real one."""

    def connect(self, store: Any, rank: int, size: int, device: torch.device) -> Any:
        torch.cuda.set_device(device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _BACKEND_TIMEOUT
        pg = dist.ProcessGroupNCCL(store, rank, size, options)
        pg.eager_connect_single_device(device)
        return pg

    def mark(self, device: torch.device) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event


def _nothing() -> None:
    """There is nothing to do while waiting."""


class NcclWork:
    """A reduction under way."""

    __slots__ = ("work",)

    def __init__(self, work: Any) -> None:
        self.work = work

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


class NcclGroup:
    """The members of a group, one GPU each. One thread uses it; `cut` may come from another.

    Args:
        check_alive: raises HorovodInternalError once the round is over.
        stalled, blocked: told of long waits, as in `gloo.GlooGroup`. while_waiting: called again and again in them.
    """

    def __init__(
        self,
        device: torch.device,
        check_alive: Callable[[], None],
        stalled: Callable[[], None],
        blocked: Callable[[bool], None],
        stall_s: float,
        *,
        while_waiting: Callable[[], None] = _nothing,
        runtime: Runtime | None = None,
    ) -> None:
        self.device = device
        self._check_alive = check_alive
        self._stalled = stalled
        self._blocked = blocked
        self._stall_s = stall_s
        self._while_waiting = while_waiting
        self._runtime: Runtime = runtime or CudaRuntime()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._cut = False
        self._failure: BaseException | None = None
        self._pg: Any = None

    def connect(self, store: Any, rank: int, size: int) -> None:
        """Make the communicator; all members call this together.

        Raises:
            HorovodInternalError: the round was cut meanwhile.
            RuntimeError: NCCL cannot; what it says.
        """

        # As Gloo, NCCL cannot be interrupted while it connects: a cut leaves the thread behind, see `GlooGroup.connect`
        def connect() -> None:
            pg = None
            try:
                pg = self._runtime.connect(store, rank, size, self.device)
            except BaseException as error:  # handed to the thread that waits for it
                self._failure = error
            with self._lock:
                late = self._cut
                self._pg = None if late else pg
            if late and pg is not None:
                _abort(pg)
            self._over.set()

        threading.Thread(target=connect, name="spark-elastic-nccl-connect", daemon=True).start()
        if not self._over.wait(CONNECT_TIMEOUT_S):
            self.cut()
            raise RuntimeError(f"NCCL did not connect within {CONNECT_TIMEOUT_S:.0f} s")
        self._check_alive()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise RuntimeError(f"NCCL does not connect: {failure}") from failure

    def allreduce(self, tensor: torch.Tensor, op: Any) -> NcclWork:
        """Raises: HorovodInternalError: a peer is gone, or the round is over."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        pg = self._pg
        if pg is None:
            self._check_alive()
            raise HorovodInternalError("the NCCL communicator is closed")
        try:
            return NcclWork(pg.allreduce([tensor], options))
        except RuntimeError as error:
            raise self._translated(error) from error

    def wait(self, work: NcclWork) -> None:
        """Until the tensor holds the sum, as far as this thread's current stream is concerned.

        Raises: HorovodInternalError: a peer is gone, or the round was cut. The tensor holds anything then.
        """
        try:
            work.work.wait()  # the stream waits, this thread does not
            done = self._runtime.mark(self.device)
            if not self._ended(work.work, done, self._stall_s):
                self._stalled()
                self._blocked(True)
                try:
                    while not self._ended(work.work, done, 0.1):
                        pass
                finally:
                    self._blocked(False)
        except HorovodInternalError:
            raise
        except RuntimeError as error:
            raise self._translated(error) from error
        self._check_alive()  # an abort sets kernels free, too, and they leave anything behind

    def _ended(self, work: Any, done: Any, within_s: float) -> bool:
        began = clock.monotonic()
        while True:
            self._check_alive()
            if done.query():
                return True
            waited = clock.monotonic() - began
            # a work that has failed counts as completed, while its kernels go on; asking why costs a warning of torch's
            if waited > _SPIN_S and work.is_completed() and (failure := _failure_of(work)) is not None:
                raise HorovodInternalError(f"NCCL failed: {failure}")
            if waited > within_s:
                return False
            if waited > _SPIN_S:
                self._while_waiting()
                time.sleep(_PAUSE_S)

    def _translated(self, error: RuntimeError) -> HorovodInternalError:
        try:
            self._check_alive()
        except HorovodInternalError as over:
            return over
        return HorovodInternalError(f"NCCL failed: {error}")

    def cut(self) -> None:
        """Abort the communicator, from any thread; the round is over already. Does not wait for it."""
        with self._lock:
            self._cut = True
            pg, self._pg = self._pg, None
        self._over.set()
        if pg is not None:
            # of its own thread: an abort can take as long as NCCL likes, and the channel to the driver must be heard
            threading.Thread(target=_abort, args=(pg,), name="spark-elastic-nccl-abort", daemon=True).start()

    def forget(self) -> Any:
        """In a forked child: hand out what must not be destroyed there."""
        pg, self._pg = self._pg, None
        return pg

    def close(self) -> None:
        """Free the communicator; safe to repeat. Not an orderly end, for which all members would have to come."""
        self.cut()


def _failure_of(work: Any) -> Any:
    """What a completed work failed with; None if it did not, or does not say."""
    try:
        return work.exception()
    except Exception as error:
        return error


def _abort(pg: Any) -> None:
    try:
        pg.abort()
    except Exception as error:
        log.warning("could not abort a NCCL communicator: %s", error)

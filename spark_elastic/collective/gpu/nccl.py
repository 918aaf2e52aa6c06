"""Reductions of tensors on GPUs: the NCCL communicator of a round, and the members' decision for or against it.

All members decide together, at the first tensor on a GPU; until then nothing is connected.

NCCL waits for ever for a peer that is gone, or for its own timeout, and by default torch then ends the whole process.
So nothing here blocks in a call that cannot be interrupted: a wait polls the collective, and `cut`, called when the
driver ends the round, aborts the communicator from another thread, which frees its kernels. The values that aborted
kernels leave behind are garbage: after each wait, check that the round has not ended before using the result. The agent
starts workers in an environment without torch's watchdog, which would end the process.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spark_elastic import clock
from spark_elastic.collective.gpu.devices import OLDEST_TORCH_FOR_NCCL, MemberDevice, choose_backend
from spark_elastic.collective.reduce import GLOO, GPU_SPIN_S, STALL_S, Fill, GroupContext, reduction_setting
from spark_elastic.errors import HorovodInternalError
from spark_elastic.helper_thread import HelperThread

log = logging.getLogger("spark_elastic.collective")

CONNECT_TIMEOUT_S = 60.0
"""The first communicator of a process loads NCCL's kernels, which takes seconds."""
_BACKEND_TIMEOUT = timedelta(days=20)
"""Above any sensible `stall_timeout`: the driver acts first."""
_PAUSE_S = 2e-4
_MESSAGE_BYTES = 1024
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NCCL_TYPES = frozenset((*_FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64))
MOST_FAILURES = 3
_failures: list[str] = []
"""NCCL's failures in this process since it last succeeded. A peer that is gone is one failure, and the next world
continues; where NCCL cannot work at all, each world would end with one."""
_warned: set[str] = set()
_warm: set[torch.device] = set()
_kept_in_child: list[Any] = []


class CudaRuntime:
    """The calls of CUDA and NCCL that need a GPU; tests replace them."""

    def connect(self, store: Any, rank: int, size: int, device: torch.device) -> Any:
        """Return a process group whose communicator exists. Blocks until all members have called it."""
        torch.cuda.set_device(device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _BACKEND_TIMEOUT
        pg = dist.ProcessGroupNCCL(store, rank, size, options)
        try:
            pg.eager_connect_single_device(device)
        except BaseException:
            _abort(pg)  # its destructor would destroy the communicator, and NCCL 2.31 hangs if another member aborts
            raise
        return pg

    def reduce_once(self, pg: Any, device: torch.device) -> None:
        """Do a tiny reduction with all members, and wait for it. An abort of the group from another thread ends it."""
        with torch.cuda.stream(torch.cuda.Stream(device)):
            pg.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions()).wait()
            torch.cuda.current_stream(device).synchronize()

    def load(self, device: torch.device) -> None:
        """Create CUDA's context, and load what the products of matrices and pinned memory need."""
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            matrix = torch.ones((16, 16), dtype=dtype, device=device)
            torch.mm(matrix, matrix)
        torch.empty(1, pin_memory=True)
        torch.cuda.synchronize(device)

    def mark(self, device: torch.device) -> Any:
        """Return an event behind all work on the device's current stream; its `query()` is True once that is done."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event


def member_device(device: torch.device) -> MemberDevice:
    """Describe this process's GPU for the other members. Initialises CUDA."""
    if not dist.is_nccl_available():
        return MemberDevice("", (0, 0), f"torch {torch.__version__} is built without NCCL")
    if len(_failures) >= MOST_FAILURES:
        return MemberDevice("", (0, 0), f"it failed {len(_failures)} times in a row: {_failures[-1]}")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH_FOR_NCCL:
        return MemberDevice("", (0, 0), f"torch {torch.__version__} cannot abort it safely; 2.7 and newer can")
    properties = torch.cuda.get_device_properties(device)
    named = f"{os.uname().nodename} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index}"
    version = torch.cuda.nccl.version()
    return MemberDevice(str(getattr(properties, "uuid", named)), (int(version[0]), int(version[1])))


class NcclWork(NamedTuple):
    """A launched reduction, and the way that waits for it."""

    way: NcclReductions
    work: Any

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


class NcclReductions:
    """Reductions by NCCL in one group and round, if all members can use it. One thread uses it; any may call `cut`."""

    def __init__(self, owner: GroupContext, connect_store: Callable[[], Any]) -> None:
        self._owner = owner
        self._connect_store = connect_store
        self._runtime = CudaRuntime()
        self._device: Any = None
        """The device of the communicator; None before the members have decided."""
        self.used = False
        """True if the members have decided for NCCL."""
        self.reason = ""
        """The reason for the decision, in words."""
        self._lock = threading.Lock()
        self._connected = threading.Event()
        """Set also when the round has ended."""
        self._cut = False
        self._failure: BaseException | None = None
        self._pg: Any = None
        self._store: Any = None

    # --- deciding and connecting ------------------------------------------------------------------

    def reduces(self, tensor: torch.Tensor, op: Any = None) -> bool:
        """Return True if NCCL reduces this tensor; the first call decides that, together with all members."""
        if self._device is None:
            self._decide(tensor.device)
            self._device = tensor.device
        return self.used and self.fits(tensor.device) and tensor.dtype in _NCCL_TYPES and tensor.is_contiguous()

    def fits(self, device: torch.device) -> bool:
        """Return True unless the communicator is of another device; torch would connect one that nothing interrupts."""
        return self._device is None or bool(self._device == device)

    def _decide(self, device: torch.device) -> None:
        mine = json.dumps(member_device(device)).encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
        answers = map(json.loads, self._owner.exchange(mine))
        members = [MemberDevice(uuid, (version[0], version[1]), why) for uuid, version, why in answers]
        backend, self.reason = choose_backend(members, reduction_setting())
        if backend == "nccl":
            failure = ""
            try:
                self.connect(device)
            except RuntimeError as error:
                failure = str(error)
            # all members use NCCL, or none does
            self.used = all(map(any, self._owner.exchange(bytes([not failure]))))
            if not self.used:
                self.cut()
                self.reason = failure or "another worker could not connect to the others' GPUs"
        log.info("gradients on GPUs go through %s: %s", "NCCL" if self.used else "Gloo", self.reason)
        if not self.used and self.reason not in _warned and reduction_setting() != GLOO:
            _warned.add(self.reason)
            log.warning("gradients on GPUs are added up through the hosts' memory, not by NCCL: %s", self.reason)

    def connect(self, device: torch.device) -> None:
        """Make the communicator; all members call this together. Raise RuntimeError if NCCL fails or is too slow."""
        self._device = device
        # torch's watchdog asks the store as long as the process group lives. If only C++ still refers to it, the
        # methods of its Python class are gone, and torch warns of a pure virtual function.
        self._store = self._connect_store()
        # Like Gloo, NCCL cannot be interrupted while it connects: a cut leaves the thread behind, see
        # `GlooCollectives.connect`.
        HelperThread(self._connect, "nccl-connect").start()
        if not self._connected.wait(CONNECT_TIMEOUT_S):
            self.cut()
            raise RuntimeError(f"NCCL did not connect within {CONNECT_TIMEOUT_S:.0f} s")
        self._owner.check_alive()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise RuntimeError(f"NCCL does not connect: {failure}") from failure

    def _connect(self) -> None:
        pg = None
        try:
            pg = self._runtime.connect(self._store, self._owner.rank, self._owner.size, self._device)
        except BaseException as error:  # handed to the thread that waits for it
            self._failure = error
        with self._lock:
            late = self._cut
            self._pg = None if late else pg
        if pg is not None and late:
            _abort(pg)
        elif pg is not None:
            # CUDA loads NCCL's kernels at the first collective, and waits until the GPU is idle: here and not in the
            # thread that trains, and after `_pg` is set, so that a cut ends it
            try:
                self._runtime.reduce_once(pg, self._device)
            except BaseException as error:
                self._failure = error
        self._connected.set()

    # --- reducing ---------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: Any, fill: Fill | None = None) -> NcclWork:
        """Launch a reduction in place. Raise HorovodInternalError if a peer is gone, or the round is over."""
        if fill is not None:
            fill(tensor, 0)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._launch("allreduce", tensor, options)

    def broadcast(self, tensor: torch.Tensor, root: int) -> NcclWork:
        """Launch a broadcast of the tensor of rank `root`. Raise HorovodInternalError as `allreduce` does."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._launch("broadcast", tensor, options)

    def _launch(self, name: str, tensor: torch.Tensor, options: Any) -> NcclWork:
        pg = self._pg
        if pg is None:
            self._owner.check_alive()
            raise HorovodInternalError("the NCCL communicator is closed")
        try:
            return NcclWork(self, getattr(pg, name)([tensor], options))
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self, work: NcclWork) -> None:
        """Wait until the tensor holds the sum; it holds garbage if an error is raised."""
        self.wait_each([work], lambda number, queued: None)

    def wait_each(self, works: Sequence[NcclWork], receive: Callable[[int, bool], None]) -> None:
        """Wait until all tensors hold the sums, and what `receive` has put on the stream behind each sum is done.

        Raises:
            HorovodInternalError: a peer is gone. The tensors hold garbage.
        """
        try:
            for number, each in enumerate(works):
                each.work.wait()  # the stream waits, this thread does not
                receive(number, True)
            last, done = works[-1].work, self._runtime.mark(self._device)  # all are of one communicator
            if not self._ended(last, done, STALL_S):
                self._owner.report_stall(True)
                try:
                    while not self._ended(last, done, 0.1):
                        pass
                finally:
                    self._owner.report_stall(False)
        except HorovodInternalError:
            raise
        except RuntimeError as error:
            raise self._failed(error) from error
        self._owner.check_alive()  # an abort ends kernels, too, and their results are garbage
        _failures.clear()

    def _ended(self, work: Any, done: Any, within_s: float) -> bool:
        began = clock.monotonic()
        while True:
            self._owner.check_alive()
            if done.query():
                return True
            waited = clock.monotonic() - began
            # a failed work counts as completed, while its kernels still run; asking for its error makes torch warn
            if waited > GPU_SPIN_S and work.is_completed() and (failure := _failure_of(work)) is not None:
                raise self._failed(failure)
            if waited > within_s:
                return False
            if waited > GPU_SPIN_S:
                time.sleep(_PAUSE_S)

    def _failed(self, error: BaseException) -> HorovodInternalError:
        """Return the error to raise for a failure of NCCL, and count it unless the round is over."""
        try:
            self._owner.check_alive()
        except HorovodInternalError as over:
            return over
        failure = f"NCCL failed: {error}"
        _failures.append(failure[:300])
        return HorovodInternalError(failure)

    def cut(self) -> None:
        """Abort the communicator, from any thread, without waiting for it; safe to repeat.

        This is also how it is closed: an orderly end would need all members.
        """
        with self._lock:
            self._cut = True
            pg, self._pg = self._pg, None
        self._connected.set()
        if pg is not None:
            # in another thread: an abort can take long, and this one must keep reading the driver's messages
            threading.Thread(target=_abort, args=(pg,), name="spark-elastic-nccl-abort", daemon=True).start()

    close = cut

    def close_in_child(self) -> None:
        # kept in a forked child: the destructor waits for threads that the child does not have
        _kept_in_child.append(self._pg)
        self._pg = None


def _failure_of(work: Any) -> BaseException | None:
    """Return the NCCL error of a completed collective; None if there is none, or if torch cannot say.

    Before torch 2.13, `Work.exception()` of NCCL raises TypeError for good and failed works alike, because it cannot
    convert its answer. Only an error that names NCCL counts; a lost peer is reported by the driver in any case.
    """
    try:
        found = work.exception()
    except Exception as error:
        found = error
    return found if isinstance(found, BaseException) and "nccl" in str(found).lower() else None


def warm_up(device: torch.device) -> None:
    """Load into this process what its first step on a GPU needs: CUDA, the products of matrices, and NCCL.

    This takes seconds, for which the others would wait if a newcomer did it in their world. Repeats do nothing.
    """
    if device in _warm:
        return
    _warm.add(device)
    began, runtime = clock.monotonic(), CudaRuntime()
    try:
        runtime.load(device)
        if choose_backend([member_device(device)], reduction_setting()).device == "nccl":
            alone = runtime.connect(dist.HashStore(), 0, 1, device)  # type: ignore[attr-defined, unused-ignore]
            try:
                runtime.reduce_once(alone, device)
            finally:
                _abort(alone)
    except RuntimeError as error:  # the first step shows whether it matters
        log.info("the GPU was not prepared before joining: %s", error)
    else:
        log.info("the GPU was prepared in %.1f s, before joining", clock.monotonic() - began)


def _abort(pg: Any) -> None:
    try:
        pg.abort()
    except Exception as error:
        log.warning("could not abort a NCCL communicator: %s", error)

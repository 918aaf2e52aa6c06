"""A Gloo process group of one round, which can be ended while its collectives run; rendezvous goes through the driver.

It is not the default group of `torch.distributed`, so users may have groups of their own beside it.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from spark_elastic import clock
from spark_elastic.collective import devices
from spark_elastic.collective.gloo_shutdown import (
    GRACE_S,
    GroupSockets,
    InFlight,
    free_ended_groups,
    graveyard,
    has_ended,
    keep_for_ever,
    leave_behind,
    open_sockets,
)
from spark_elastic.collective.joining import STALL_S, CollectiveLog
from spark_elastic.collective.negotiation import Negotiation
from spark_elastic.collective.one_thread import in_one_thread
from spark_elastic.errors import HorovodInternalError
from spark_elastic.wire.worker_link import WorkerLink

Fill = Callable[[torch.Tensor, int], None]
"""`fill(out, start)` writes the elements of a flat tensor from index `start` on into `out`."""

CONNECT_TIMEOUT_S = 20.0
"""The time limit for the members of a new world to connect; all of them are waiting when it is published."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""The least value of Gloo's own timeout. The driver notices lost workers much earlier, and then ends the round."""
_LONGEST_TIMEOUT_S = 20 * 24 * 3600.0
"""Gloo waits with `poll`, whose timeout in milliseconds has 32 bits."""

_STALL = timedelta(seconds=STALL_S)
_SLICE = timedelta(seconds=0.1)
_LOOK_AGAIN_S = 0.02

_CONNECTION_WORDS = (
    "connection",
    "timed out",
    "timeout",
    "socket",
    "broken pipe",
    "reset by peer",
    "closed",
    "connect",
    "network",
    "pair.cc",
    "unbound_buffer",
)


def is_connection_error(error: BaseException) -> bool:
    """Return True if Gloo's error means that a peer is gone, False if the call was wrong.

    Gloo raises a plain RuntimeError for both; "enforce fail" is its assertion about arguments.
    """
    text = str(error).lower()
    return "enforce fail" not in text and any(word in text for word in _CONNECTION_WORDS)


class LinkStore(dist.Store):  # type: ignore[misc, name-defined]
    """One group's keys of one round in the driver's key-value store, as a store of PyTorch."""

    def __init__(self, link: WorkerLink, round: int, prefix: str) -> None:
        super().__init__()
        self._link = link
        self._round = round
        self._prefix = prefix
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._link.kv_set(self._round, self._prefix + key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._fetch([key], CONNECT_TIMEOUT_S)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._fetch(keys, timeout.total_seconds() if timeout else CONNECT_TIMEOUT_S)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        return False

    def _fetch(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        missing = [key for key in keys if key not in self._values]
        if missing:
            values = self._link.kv_get(self._round, [self._prefix + key for key in missing], timeout_s)
            self._values.update(zip(missing, values, strict=True))
        return [self._values[key] for key in keys]


def compact(address: bytes) -> str:
    """Return an address of Gloo as text. It has a number of 8 bytes for each member, and these grow by one.

    So the differences between bytes that are 8 apart are mostly zeros, and few of them are left after compression.
    """
    differences = np.frombuffer(address, np.uint8).copy()
    differences[8:] -= differences[:-8].copy()
    return base64.b64encode(zlib.compress(differences.tobytes())).decode()


def restore(text: str) -> bytes:
    """Return the address that `compact` has made the text of."""
    differences = zlib.decompress(base64.b64decode(text))
    rows = np.frombuffer(differences + bytes(-len(differences) % 8), np.uint8).reshape(-1, 8)
    return rows.cumsum(axis=0, dtype=np.uint8).tobytes()[: len(differences)]


class AddressExchange(dist.Store):  # type: ignore[misc, name-defined]
    """The store through which the members of one group exchange their addresses.

    Each member sends its own to the driver, which answers all of them with one table once it has all addresses. Kind
    and note are what the others get besides: see `GlooGroup.kinds` and `GlooGroup.note`.
    """

    def __init__(self, link: WorkerLink, round: int, name: str, rank: int, size: int, kind: str, note: str) -> None:
        super().__init__()
        self._link = link
        self._round, self._name, self._rank, self._size = round, name, rank, size
        self._kind, self._note = kind, note
        self._own = ""
        self.kinds: list[str] = []
        self.notes: list[str] = []
        self.addresses: list[bytes] = []
        """The members' addresses, by rank; empty before they were exchanged."""
        self.error: BaseException | None = None
        """The link's error. Gloo converts exceptions of the store and loses their type, so it is kept here."""

    def set(self, key: str, value: Any) -> None:
        self._own = json.dumps([self._kind, self._note, compact(bytes(value))])

    def get(self, key: str) -> bytes:
        self._exchange()
        return self.addresses[int(key.removeprefix("0/"))]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._exchange()

    def check(self, keys: list[str]) -> bool:
        return bool(self.addresses)

    def has_extended_api(self) -> bool:
        return False

    def _exchange(self) -> None:
        if self.addresses:
            return
        try:
            found = self._link.gather(self._round, self._name, self._rank, self._size, self._own, CONNECT_TIMEOUT_S)
        except BaseException as error:
            self.error = error
            raise
        table = [json.loads(each) for each in found]
        self.kinds, self.notes = [kind for kind, _, _ in table], [note for _, note, _ in table]
        self.addresses = [restore(address) for _, _, address in table]


class GlooGroup:
    """A process group of one round. One thread uses it; `cut`, which ends it, may be called from any thread.

    Its name identifies it among the groups of the round, in the key-value store. The members bind to the addresses,
    which are in the order of their ranks in this group.
    """

    def __init__(self, link: WorkerLink, round: int, name: str, rank: int, addresses: Sequence[str]) -> None:
        self.round = round
        self.rank = rank
        self.size = len(addresses)
        self.name = name
        self.objects = 0
        """The number of object collectives so far. Their MACs cover it, so that no message can be replayed."""
        self.kinds: set[str] = set()
        """The kinds of devices that the members' tensors may be on: "cpu", "gpu", or both if members differ."""
        self.log = CollectiveLog(link, round, name, rank, len(addresses))
        self.negotiation = Negotiation(self)
        self.world_ranks: Sequence[int] = range(len(addresses))
        """The members' ranks in the world."""
        self.note = ""
        """A text that all members get when they connect."""
        self.notes: list[str] = []
        """The notes of all members, by rank."""
        self._addresses = list(addresses)
        self._link = link
        self._why: str | None = None
        """The reason why the group is over; None while it is in use."""
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._abandoned = False
        self._cut_at = float("inf")
        self._in_flight = InFlight()
        self._failure: BaseException | None = None
        self._sockets: GroupSockets | None = None
        self.pg: ProcessGroupGloo | None = None

    def connect(self) -> None:
        """Connect all members to one another; all of them call this.

        Raises:
            HorovodInternalError: they did not connect within `CONNECT_TIMEOUT_S`, or the driver has ended the round.
            Exception: of a comparison that was begun for another group, and was completed meanwhile.
        """
        # Gloo cannot be interrupted while it connects, and it waits for a peer that dies then until the timeout. So
        # another thread connects, and a cut leaves that thread behind: it ends by itself and frees what it has made.
        kind = "gpu" if devices.may_use_gpu(devices.device_setting(), devices.device_info()) else "cpu"
        store = AddressExchange(self._link, self.round, self.name, self.rank, self.size, kind, self.note)
        threading.Thread(target=self._connect, args=(store,), name="spark-elastic-connect", daemon=True).start()
        of_another: Exception | None = None
        try:
            self.negotiation.serve_begun(self._over.is_set)
        except Exception as error:
            of_another = error
        self._over.wait()
        with self._lock:
            if self._why is not None or self._failure is not None:
                self._abandoned = True
        if self._abandoned:
            give_up_device(self._addresses[self.rank])
            failure, self._failure, why = self._failure, None, self._why
            self.close()
            raise HorovodInternalError(
                f"the members of round {self.round} could not be connected: {why or failure}"
            ) from failure
        if of_another is not None:
            self.close()
            raise of_another
        _groups.add(self)

    def _connect(self, store: AddressExchange) -> None:
        pg: ProcessGroupGloo | None = None
        sockets: GroupSockets | None = None
        failure: BaseException | None = None
        try:
            before = frozenset(open_sockets().values())
            pg = ProcessGroupGloo(store, self.rank, self.size, _options(self._addresses[self.rank]))
            sockets = GroupSockets(before, set(self._addresses), store.addresses)
            self.kinds, self.notes = set(store.kinds), store.notes
            timeout_s = max(COLLECTIVE_TIMEOUT_S, 2 * self._link.stall_timeout_s)  # so that the driver acts first
            pg._set_default_timeout(timedelta(seconds=min(timeout_s, _LONGEST_TIMEOUT_S)))
        except BaseException as error:  # raised in the thread that waits
            failure = store.error or error
        with self._lock:
            if self._abandoned:
                # No shutdown: this thread may come here late, and some of the sockets may be those of the next world,
                # whose members may listen at the same ports. Gloo closes those of this group with the group.
                if sockets is not None:
                    sockets.close()
            else:
                self.pg, self._sockets, self._failure = pg, sockets, failure
        self._over.set()

    def cut(self, why: str) -> None:
        """End the group at once, from any thread: blocked and later collectives raise HorovodInternalError."""
        with self._lock:
            if self._why is None:
                self._why = why
        self._over.set()
        if self._sockets is not None:
            self._sockets.shutdown()
        self._cut_at = min(self._cut_at, clock.monotonic())

    def check_alive(self) -> None:
        """Raise HorovodInternalError if the group was closed, or the driver has ended the round."""
        if self._why is not None:
            raise HorovodInternalError(f"round {self.round} is over: {self._why}")
        if self._link.cut_round() >= self.round:
            raise HorovodInternalError(f"round {self.round} is over: the driver has ended it")

    def check_alive_for(self, seconds: float) -> None:
        """Wait, and raise HorovodInternalError if the group is closed or its round ends meanwhile."""
        until = clock.monotonic() + seconds
        while (left := until - clock.monotonic()) > 0:
            self.check_alive()
            time.sleep(min(left, _LOOK_AGAIN_S))

    def translate(self, error: Exception) -> Exception:
        """Return the exception to raise for an error of one of this group's collectives."""
        if isinstance(error, HorovodInternalError):
            return error
        if self._why is not None or self._link.cut_round() >= self.round:
            return HorovodInternalError(f"round {self.round} is over: {self._why or 'the driver has ended it'}")
        if isinstance(error, RuntimeError) and is_connection_error(error):
            return HorovodInternalError(f"a collective failed: {error}")
        return error

    # --- collectives: all members launch them in the same order, and wait in any order ------------

    @in_one_thread
    def allreduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, fill: Fill | None = None) -> Any:
        """Launch an all-reduce of a contiguous tensor, which holds the result after `wait`; return the work.

        `fill` writes this member's contribution; None: it is in `tensor`.
        """
        self._settle()
        self.log.launched("allreduce", tensor, op)
        if fill is not None:
            fill(tensor, 0)
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        return self._launch("allreduce", [tensor], options)

    @in_one_thread
    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        self._settle()
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.log.launched("broadcast", tensor, root)
        return self._launch("broadcast", [tensor], options)

    @in_one_thread
    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        """Launch an all-gather of tensors of equal size; `out` receives them in rank order. Return the work."""
        self._settle()
        self.log.launched("allgather", tensor, None)
        return self._launch("_allgather_base", out, tensor)

    @in_one_thread
    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]) -> dist.Work:
        """Launch an all-to-all; return the work. `received` and `sent` count the rows from and to each member."""
        self._settle()
        self.log.launched("alltoall", tensor, None)
        return self._launch("alltoall_base", out, tensor, received, sent)

    def _settle(self) -> None:
        """Launch the queued collectives first; see `Negotiation.settle`."""
        if self.negotiation.is_due:
            self.negotiation.settle()

    def report_stall(self, begins: bool) -> None:
        """Report the beginning or the end of a long wait to the driver, and look for ranks that have joined."""
        if begins:
            self.log.stalled()
        self._link.blocked(begins)

    @in_one_thread
    def exchange(self, mine: bytes, *, serve: bool = False) -> list[bytes]:
        """Return the bytes of all members, which must have equal lengths. Ranks that have joined do not take part.

        `serve`: complete comparisons that were begun for other groups meanwhile. Not within such a comparison.
        """
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        everyone = sent.new_empty((self.size, sent.numel()))
        work = self._launch("_allgather_base", everyone.view(-1), sent)
        if serve:
            self.negotiation.serve_others(work)
        self.wait(work)
        return [row.numpy().tobytes() for row in everyone]

    @in_one_thread
    def wait(self, work: Any) -> None:
        """Block until a launched collective is done. Raise HorovodInternalError if a peer or the round is gone."""
        try:
            if not has_ended(work, _STALL):
                self._wait_on(work)
        except Exception as error:
            raise self.translate(error) from error
        finally:
            self._in_flight.discard(work)

    def _wait_on(self, work: dist.Work) -> None:
        self.report_stall(True)
        try:
            while not has_ended(work, _SLICE):
                if clock.monotonic() - self._cut_at > GRACE_S:  # see `gloo_shutdown`
                    raise HorovodInternalError(f"round {self.round} is over: {self._why}")
        finally:
            self.report_stall(False)

    def _launch(self, name: str, *args: Any) -> Any:
        self.check_alive()
        try:
            work = getattr(self.pg, name)(*args)
        except Exception as error:
            raise self.translate(error) from error
        self._in_flight.add(work)
        return work

    def close(self) -> None:
        """Disconnect and free everything; safe to repeat. Collectives in flight fail."""
        with self._lock:
            if self._why is None:
                self._why = "the group was closed"
        self.negotiation.close()
        with self._lock:
            self._abandoned = True  # a thread that still connects frees what it has made
            pg, self.pg = self.pg, None
            sockets, self._sockets = self._sockets, None
        if sockets is not None:
            sockets.shutdown()
        stuck = self._in_flight.stuck()
        self._in_flight = InFlight()
        if stuck:
            leave_behind(pg, stuck)
        elif pg is not None:
            graveyard.bury(pg)
        free_ended_groups()
        if sockets is not None:
            sockets.close()
        _groups.discard(self)

    def _close_in_child(self) -> None:
        keep_for_ever(self.pg)
        self._why = "this is a forked child"
        if self._sockets is not None:
            self._sockets.close_in_child()


_groups: weakref.WeakSet[GlooGroup] = weakref.WeakSet()
_devices: dict[str, Any] = {}
"""Gloo's devices by the address that they listen at. Each has a listener, and a thread for all its connections."""


def _options(address: str) -> Any:
    """Return the options of a group that listens at that address, on this process's device there."""
    if address not in _devices:
        _devices[address] = ProcessGroupGloo.create_device(hostname=address)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_devices[address]]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    options._threads = 2
    return options


def give_up_device(address: str) -> None:
    """Use another device at that address from now on: members of a world may be connected to this one, or connect."""
    device = _devices.pop(address, None)
    if device is not None:
        graveyard.bury(device)


def _close_all_in_child() -> None:
    # destructors would wait for threads that a child does not have
    for thing in (*graveyard.forget_in_child(), *_devices.values()):
        keep_for_ever(thing)
    _devices.clear()
    for group in list(_groups):
        group._close_in_child()


# A data loader's forked worker would otherwise keep its parent's connections open when the parent is killed, and the
# parent's peers would not notice until that worker has ended too.
os.register_at_fork(after_in_child=_close_all_in_child)

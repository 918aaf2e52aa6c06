"""The Gloo process group of one round, which can be ended while its collectives run.

It is not the default group of `torch.distributed`, so users may have groups of their own beside it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from spark_elastic import clock
from spark_elastic.collective.gloo.rendezvous import CONNECT_TIMEOUT_S, AddressExchange
from spark_elastic.collective.gloo.shutdown import (
    GRACE_S,
    GroupSockets,
    free_ended_groups,
    graveyard,
    has_ended,
    is_stuck,
    keep_for_ever,
    leave_behind,
    open_sockets,
)
from spark_elastic.collective.reduce import STALL_S, Fill, GroupContext
from spark_elastic.errors import HorovodInternalError
from spark_elastic.helper_thread import HelperThread

COLLECTIVE_TIMEOUT_S = 1800.0
"""The least value of Gloo's own timeout. The driver notices lost workers much earlier, and then ends the round."""
_LONGEST_TIMEOUT_S = 20 * 24 * 3600.0
"""Gloo waits with `poll`, whose timeout in milliseconds has 32 bits."""

_PRUNE_AT = 64
_STALL = timedelta(seconds=STALL_S)
_SLICE = timedelta(seconds=0.1)

_CONNECTION_ERROR = re.compile(
    r"connect|timed out|timeout|socket|broken pipe|reset by peer|closed|network|pair\.cc|unbound_buffer", re.IGNORECASE
)
"""Gloo's error if a peer is gone. It raises a plain RuntimeError, too, if the call was wrong: "enforce fail"."""


class GlooCollectives:
    """The collectives over Gloo of the group `owner`. One thread uses it; `cut`, which ends them, any may call."""

    def __init__(self, owner: GroupContext) -> None:
        self._owner = owner
        self._over = threading.Event()
        """Set once the members are connected, or the round has ended."""
        self._lock = threading.Lock()
        self._abandoned = False
        self._cut_at = float("inf")
        self._works: list[dist.Work] = []
        """The launched collectives that were not yet seen to end."""
        self._failure: BaseException | None = None
        self.sockets: GroupSockets | None = None
        self.pg: ProcessGroupGloo | None = None

    # --- beginning and end ------------------------------------------------------------------------

    def connect(
        self,
        store: AddressExchange,
        addresses: Sequence[str],
        stall_timeout_s: float,
        meanwhile: Callable[[Callable[[], bool]], None],
    ) -> None:
        """Connect all members to one another; all of them call this.

        The members bind to `addresses`, by rank. The driver ends a round in which a collective takes longer than
        `stall_timeout_s`. `meanwhile` is called with a function that returns True once it must return.

        Raises:
            HorovodInternalError: they did not connect within `CONNECT_TIMEOUT_S`, or the driver has ended the round.
        """
        # Gloo cannot be interrupted while it connects, and it waits for a peer that dies then until the timeout. So
        # another thread connects, and a cut leaves that thread behind: it ends by itself and frees what it has made.
        HelperThread(self._connect, "connect", (store, addresses, stall_timeout_s)).start()
        raised: Exception | None = None
        try:
            meanwhile(self._over.is_set)
        except Exception as error:
            raised = error
        self._over.wait()
        with self._lock:
            self._abandoned = self._owner.why is not None or self._failure is not None
        if self._abandoned:
            # another device from now on: members of a world may be connected to this one, or connect
            if addresses[self._owner.rank] in _devices:
                graveyard.bury(_devices.pop(addresses[self._owner.rank]))
            failure, self._failure = self._failure, None
            why = self._owner.why or failure
            raise HorovodInternalError(
                f"the members of round {self._owner.round} could not be connected: {why}"
            ) from failure
        if raised is not None:
            raise raised

    def _connect(self, store: AddressExchange, addresses: Sequence[str], stall_timeout_s: float) -> None:
        pg: ProcessGroupGloo | None = None
        sockets: GroupSockets | None = None
        failure: BaseException | None = None
        try:
            before = frozenset(open_sockets().values())
            pg = ProcessGroupGloo(store, self._owner.rank, len(addresses), _options(addresses[self._owner.rank]))
            sockets = GroupSockets(before, set(addresses), [announced for _, _, announced in store.table])
            timeout_s = max(COLLECTIVE_TIMEOUT_S, 2 * stall_timeout_s)  # so that the driver acts first
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
                self.pg, self.sockets, self._failure = pg, sockets, failure
        self._over.set()

    def cut(self) -> None:
        """End it at once, from any thread; blocked collectives raise HorovodInternalError."""
        self._over.set()
        if (sockets := self.sockets) is not None:  # `close` may forget them at this moment
            sockets.shutdown()
        self._cut_at = min(self._cut_at, clock.monotonic())

    def close(self) -> None:
        """Disconnect and free everything; safe to repeat. Collectives in flight fail."""
        with self._lock:
            self._abandoned = True  # a thread that still connects frees what it has made
            pg, self.pg = self.pg, None
            sockets, self.sockets = self.sockets, None
        if sockets is not None:
            sockets.shutdown()
        works, self._works = self._works, []
        if stuck := [work for work in works if is_stuck(work)]:
            leave_behind(pg, stuck)
        elif pg is not None:
            graveyard.bury(pg)
        free_ended_groups()
        if sockets is not None:
            sockets.close()

    def close_in_child(self) -> None:
        keep_for_ever(self.pg)
        if self.sockets is not None:
            self.sockets.close_in_child()

    # --- collectives ------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: Any, fill: Fill | None = None) -> dist.Work:
        if fill is not None:
            fill(tensor, 0)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self.launch("allreduce", [tensor], options)

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self.launch("broadcast", [tensor], options)

    def launch(self, name: str, *args: Any) -> dist.Work:
        """Launch a collective by its name in torch; return the work."""
        self._owner.check_alive()
        try:
            work: dist.Work = getattr(self.pg, name)(*args)
        except Exception as error:
            raise self._translate(error) from error
        if len(self._works) >= _PRUNE_AT:
            self._works = [known for known in self._works if not known.is_completed()]
        self._works.append(work)
        return work

    def wait(self, work: dist.Work) -> None:
        """Block until a launched collective is done. Raise HorovodInternalError if a peer or the round is gone."""
        try:
            if not has_ended(work, _STALL):
                self._owner.report_stall(True)
                try:
                    while not has_ended(work, _SLICE):
                        if clock.monotonic() - self._cut_at > GRACE_S:  # see `shutdown`
                            self._owner.check_alive()
                finally:
                    self._owner.report_stall(False)
        except Exception as error:
            raise self._translate(error) from error
        finally:
            if work in self._works and work.is_completed():
                self._works.remove(work)

    def _translate(self, error: Exception) -> Exception:
        """Return the exception to raise for an error of a collective."""
        if isinstance(error, HorovodInternalError):
            return error
        try:
            self._owner.check_alive()
        except HorovodInternalError as over:
            return over
        text = str(error)
        if isinstance(error, RuntimeError) and _CONNECTION_ERROR.search(text) and "enforce fail" not in text.lower():
            return HorovodInternalError(f"a collective failed: {error}")
        return error


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


def _keep_devices_in_child() -> None:
    # destructors would wait for threads that a child does not have
    for thing in (*graveyard.forget_in_child(), *_devices.values()):
        keep_for_ever(thing)
    _devices.clear()


os.register_at_fork(after_in_child=_keep_devices_in_child)

"""The life of a call of a collective: it is queued, compared with the other members' calls, launched and waited for.

`operations` has the collectives themselves. Each of them describes its call in a text that must be the same on all
members, and passes a function that launches it once they have agreed, see `negotiation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from spark_elastic.collective.group import Group, as_bytes
from spark_elastic.collective.negotiation import Launched, Launching, Pending, until_done
from spark_elastic.collective.one_thread import in_one_thread
from spark_elastic.collective.operators import ReduceOp
from spark_elastic.errors import UsageError


class Handle:
    """A collective that was called; `wait`, or a call of the handle, returns its result or raises its error.

    It has the launched operations and what makes their result, or the call that members have not agreed on yet.
    """

    __slots__ = ("_error", "_finish", "_group", "_pending", "_result", "_works")

    def __init__(
        self,
        group: Group | None,
        works: Sequence[Any],
        finish: Callable[[], Any] | None,
        pending: Pending | None = None,
    ) -> None:
        self._group, self._finish, self._pending = group, finish, pending
        self._works = list(works)
        self._result: Any = None
        self._error: Exception | None = None

    def __call__(self) -> Any:
        return self.wait()

    @in_one_thread
    def done(self) -> bool:
        try:
            self._launch()
        except Exception as error:
            self._fail(error)
        return all(work.is_completed() for work in self._works)

    @in_one_thread
    def wait(self) -> Any:
        if self._error is not None:
            raise self._error
        try:
            self._launch()
            while self._works:
                assert self._group is not None
                self._group.negotiation.serve(self._works[0].is_completed)
                self._group.wait(self._works[0])
                del self._works[0]
            finish, self._finish = self._finish, None
            if finish is not None:
                self._result = finish()
        except Exception as error:
            self._fail(error)
            raise
        return self._result

    def _launch(self) -> None:
        if self._pending is not None:
            assert self._group is not None
            works, self._finish = self._group.negotiation.launch(self._pending)
            self._works = list(works)
            self._pending = None

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._works, self._finish, self._pending = [], None, None


def poll(handle: Handle) -> bool:
    """Return True if `synchronize` would return or raise without blocking.

    The first call itself waits, until all members have called this collective or wait for another one.
    """
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective; return its result. Raises HorovodInternalError (lost peer) or MismatchError."""
    return handle.wait()


# --- announcing a call --------------------------------------------------------------------------------


def queue_call(
    group: Group, kind: str, name: str | None, description: str, launch: Callable[[Group], Launched | Launching]
) -> Handle:
    """Queue a collective for comparison with the other members' calls; return its handle.

    Calls are matched by the user's `name`, or in their order if it is None. `description`, with types, shapes and
    settings, must be the same on all members. `launch` is a generator if it waits for other exchanges first.
    """
    return Handle(group, [], None, group.negotiation.queue(kind, name, description, partial(launch, group)))


def refuse_call(group: Group | None, kind: str, name: str | None, error: UsageError) -> UsageError:
    """Return the error for the caller to raise, and queue it for the other members, which wait for this collective."""
    if group is not None:
        group.negotiation.queue(kind, name, "", None, problem=str(error))
    return error


def agree(group: Group | None, kind: str, description: str = "", name: str | None = None, detail: str = "") -> bool:
    """Wait until all members have called this with the same `kind`, `name` and `description`; None: a world of one.

    Returns:
        True if all members have the same `detail`. False, on all of them, if some differ or it is not known.

    Raises:
        MismatchError: they have called something else.
        HorovodInternalError: a peer is gone.
    """
    if group is None:
        return True
    pending = group.negotiation.queue(kind, name, description, None, detail=detail)
    group.negotiation.launch(pending)
    return pending.alike


def describe_tensor(tensor: torch.Tensor, rows: bool = True) -> str:
    """Return the type and shape of a tensor; without the first dimension's size if `rows` is False."""
    shape = list(tensor.shape) if rows else ["any", *tensor.shape[1:]]
    return f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}]"


def describe_reduction(
    tensors: Sequence[torch.Tensor], op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
) -> str:
    """Return the description of a reduction of these tensors, for `queue_call`."""
    factors = "" if prescale == postscale == 1.0 else f", factors {prescale} and {postscale}"
    return f"{'; '.join(map(describe_tensor, tensors))}, op={op.name}{factors}"


def start_allgather(group: Group, tensor: torch.Tensor) -> Launching:
    """Launch an all-gather of contiguous tensors along the first dimension, without comparing the members' calls."""
    everyone = torch.empty(group.size, dtype=torch.int64, device="cpu")
    yield from until_done(group, group.allgather(everyone, torch.tensor([tensor.shape[0]], device="cpu")))
    rows: list[int] = everyone.tolist()  # a rank that has joined sends zero
    most = max(rows)
    if most * tensor.shape[1:].numel() == 0:
        return [], lambda: tensor.new_empty((sum(rows), *tensor.shape[1:]))
    missing = most - tensor.shape[0]
    sent = torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) if missing else tensor
    out = tensor.new_empty((group.size, most, *tensor.shape[1:]))
    work = group.allgather(as_bytes(out), as_bytes(sent))

    def finish() -> torch.Tensor:
        if min(rows) == most:
            return out.flatten(0, 1)
        return torch.cat([out[rank, :count] for rank, count in enumerate(rows)])

    return [work], finish

"""Pieces of a reduction within a host: what they are called in the table, how they are added up and cut into slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_KINDS = {
    dtype: number
    for number, dtype in enumerate(
        (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
    )
}
_OPERATORS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "SUM": (0, torch.add),
    "PRODUCT": (1, torch.mul),
    "MIN": (2, torch.minimum),
    "MAX": (3, torch.maximum),
}
_SLICE_ALIGN_BYTES = 64
"""Two members never write to one cache line."""


@dataclass(slots=True)
class Piece:
    """One that this member has launched and not read yet."""

    number: int
    out: torch.Tensor
    """Where the result goes."""
    sent: torch.Tensor
    """What this member sends, in its segment."""
    in_place: bool
    """Whether what was sent lies in `out`, too, until the result does."""
    code: int
    op: Any
    slices: list[slice] | None
    """The elements that each owner adds up for all; None: every member adds up everything for itself."""
    between: Any = None
    """The reduction of this member's slice with the other hosts'."""

    @property
    def combine(self) -> Callable[..., torch.Tensor]:
        return _OPERATORS[_name(self.op)][1]


def reducible(tensor: torch.Tensor, op: Any) -> bool:
    return tensor.dtype in _KINDS and tensor.device.type == "cpu" and _name(op) in _OPERATORS


def code_of(tensor: torch.Tensor, op: Any) -> int:
    """Size, type and operator in one number: equal on all members, if they mean the same."""
    nbytes = tensor.numel() * tensor.element_size()
    return nbytes << 16 | _KINDS[tensor.dtype] << 8 | _OPERATORS[_name(op)][0]


def bytes_of(code: int) -> int:
    return code >> 16


def described(code: int) -> str:
    dtype = next((str(dtype) for dtype, number in _KINDS.items() if number == code >> 8 & 0xFF), "?")
    return f"{code >> 16} bytes of {dtype}"


def sliced(tensor: torch.Tensor, owners: int) -> list[slice]:
    """About equal parts of a flat tensor, one for each owner; the last ones may be empty."""
    count, unit = tensor.numel(), _SLICE_ALIGN_BYTES // tensor.element_size()
    each = -(-count // (owners * unit)) * unit
    return [slice(min(count, each * owner), min(count, each * (owner + 1))) for owner in range(owners)]


def combined(parts: Sequence[torch.Tensor], out: torch.Tensor, combine: Callable[..., torch.Tensor]) -> None:
    """The parts, one after the other, into `out`, which may be one of the first two of them.

    Types of 16 bits are rounded once, at the end.
    """
    if len(parts) > 2 and out.dtype in (torch.float16, torch.bfloat16):
        total = parts[0].float()
        for part in parts[1:]:
            total = combine(total, part)
        out.copy_(total)
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


def _name(op: Any) -> str:
    return str(op).rsplit(".", 1)[-1]

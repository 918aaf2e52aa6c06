"""Combine the members' contributions to a reduction in the order of their ranks, so that all get the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

DTYPES = {
    dtype: number
    for number, dtype in enumerate(
        (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
    )
}
"""The types that are combined here, with their numbers in `reducer.chunk_code`; Gloo reduces others."""
OPERATORS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "SUM": (0, torch.add),
    "PRODUCT": (1, torch.mul),
    "MIN": (2, torch.minimum),
    "MAX": (3, torch.maximum),
}
"""The operators by Gloo's names: their numbers in `reducer.chunk_code`, and their functions."""


def operator_name(op: Any) -> str:
    """Return the name of Gloo's operator, without the name of its class."""
    return str(op).rsplit(".", 1)[-1]


def combine_into(parts: Sequence[torch.Tensor], out: torch.Tensor, op: Any) -> None:
    """Combine the parts, in order, into `out`, which may be one of the first two of them.

    Types of 16 bits are rounded once, at the end.
    """
    combine = OPERATORS[operator_name(op)][1]
    if len(parts) > 2 and out.dtype in (torch.float16, torch.bfloat16):
        total = parts[0].float()
        for part in parts[1:]:
            total = combine(total, part)
        out.copy_(total)
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)

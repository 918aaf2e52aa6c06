"""Gradient buckets: one flat buffer for many gradients, which are reduced together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.reduction import CastCompressor, Compressor, NoneCompressor, ReduceOp, scaling_factors

BUCKET_BYTES = 25 << 20
"""The size at which a bucket is full. Buckets are filled in the usual order of backward: last layer first."""
FIRST_BUCKET_BYTES = 1 << 20


class Bucket:
    """Gradients of one type that are reduced together.

    Args:
        params: tensors of one type and device; only their shapes are used.
        compression: the compressor of the sent values.
        flagged: the bucket has a `flag`.
        piggyback: the number of elements for other numbers that are reduced with the gradients.
        align: each view begins at a multiple of this many bytes.

    Attributes:
        flat: the buffer, for the gradients, then the piggyback numbers, then the flag.
        views: the gradients in `flat`, shaped like their parameters.
        piggyback: the other numbers in `flat`; None if there are none, or if the sent type would round them.
        flag: the element of `flat` that says that the driver has announced a coming world; None in other buckets.
        after: the factor to multiply `flat` by after the sum.
    """

    __slots__ = (
        "_before",
        "_context",
        "_sources",
        "_starts",
        "_wire",
        "after",
        "compression",
        "flag",
        "flat",
        "params",
        "piggyback",
        "ready",
        "uses",
        "views",
    )

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        compression: type[Compressor],
        flagged: bool,
        piggyback: int = 0,
        align: int = 1,
    ) -> None:
        self.params = list(params)
        self.compression = compression
        self.ready = 0
        self.uses = 0
        first = params[0]
        unit = max(1, align // first.element_size())
        sizes = [-(-param.numel() // unit) * unit for param in params]
        if compression is not NoneCompressor or first.dtype not in (torch.float32, torch.float64):
            piggyback = 0
        self.flat = torch.zeros(sum(sizes) + piggyback + flagged, dtype=first.dtype, device=first.device)
        self.flag = self.flat[-1] if flagged else None
        self.piggyback = self.flat[sum(sizes) : sum(sizes) + piggyback] if piggyback else None
        pieces = self.flat[: sum(sizes)].split(sizes)
        self.views = [_shaped(piece[: param.numel()], param) for piece, param in zip(pieces, params, strict=True)]
        self._starts = [0, *accumulate(sizes)]
        """The index in `flat` at which each gradient begins, and the index behind the last one."""
        self._sources: list[torch.Tensor | None] = []
        self._before = 1.0
        self.after = 1.0
        self._wire: torch.Tensor | None = None
        self._context: Any = None

    def scale(self, op: ReduceOp, predivide: float, size: int) -> None:
        """Set the factors to multiply gradients by before and after the sum."""
        cast = issubclass(self.compression, CastCompressor) and self.flat.dtype.is_floating_point
        wire = self.compression.dtype if cast else self.flat.dtype  # type: ignore[attr-defined]
        self._before, self.after = scaling_factors(op, predivide, size, wire)

    def send(self, group: GlooGroup, op: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        """Launch the reduction of the scaled gradients; `flag` and `piggyback` are sent with their present values.

        Args:
            group: the members.
            op: Gloo's operator.
            gradients: in the order of `params`, shaped like them, or None for zeros. They may be the views, and are no
                longer needed when this returns.

        Returns:
            The work. After waiting for it, call `unpack`.
        """
        self._sources = [
            None if gradient is None else _flattened(gradient, view)
            for gradient, view in zip(gradients, self.views, strict=True)
        ]
        try:
            if self.compression is NoneCompressor:
                return group.allreduce(self.flat, op, self._fill)
            self._fill(self.flat, 0)
            return group.allreduce(self._compressed(), op)
        finally:
            self._sources = []

    def _fill(self, out: torch.Tensor, start: int) -> None:
        """Write the values to send, beginning with the element at `start` of `flat`, into `out`, shape (elements,)."""
        end = start + out.numel()
        gradients_end = self._starts[-1]
        number = bisect_right(self._starts, start) - 1
        while number < len(self._sources) and self._starts[number] < end:
            source, place = self._sources[number], self._starts[number]
            size = self.params[number].numel()
            first, last = max(place, start), min(place + size, end)
            number += 1
            if first >= last:
                continue
            part = out[first - start : last - start]
            if source is None:
                part.zero_()
                continue
            if last - first < size:
                source = source[first - place : last - place]
            torch.mul(source, self._before, out=part)
        if end > gradients_end and out is not self.flat:
            first = max(start, gradients_end)
            out[first - start :].copy_(self.flat[first:end])

    def _compressed(self) -> torch.Tensor:
        if issubclass(self.compression, CastCompressor):
            if self._wire is None:
                self._wire = torch.empty_like(self.flat, dtype=self.compression.dtype)
            return self._wire.copy_(self.flat)
        self._wire, self._context = self.compression.compress(self.flat)
        self._wire = self._wire.contiguous()
        return self._wire

    def unpack(self) -> None:
        """Decompress the received values into `flat`."""
        if self._wire is None:
            return
        if issubclass(self.compression, CastCompressor):
            self.flat.copy_(self._wire)
        else:
            self.flat.copy_(self.compression.decompress(self._wire, self._context))


def _shaped(piece: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the piece with the parameter's shape and memory layout, with which optimizers are fastest."""
    if param.is_contiguous():
        return piece.view(param.shape)
    if param.numel() == 0 or not param.is_non_overlapping_and_dense():  # type: ignore[attr-defined]
        return piece.view(param.shape)
    return piece.as_strided(param.shape, param.stride())


def _flattened(gradient: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return the elements, shape (elements,), in the memory order of the view; copy only if the orders differ."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    if gradient.is_contiguous() and view.is_contiguous():
        return gradient.view(-1)
    if gradient.stride() != view.stride():
        gradient = torch.empty_like(view).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def partition(
    params: Sequence[torch.Tensor], groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    """Divide parameters into buckets.

    Args:
        params: the parameters in the order of their registration.
        groups: the number of about equal buckets; or lists of parameters that share a bucket, where the parameters in
            none of them are divided by size; or None to fill buckets up to their size, last layer first.

    Returns:
        Lists of parameters of one type and device each, in the order in which they are reduced.
    """
    if groups is None:
        return _by_size(list(reversed(params)))
    if isinstance(groups, int):
        ordered = list(reversed(params))
        quotient, rest = divmod(len(ordered), groups)
        cuts = [i * quotient + min(i, rest) for i in range(groups + 1)]
        chosen = [ordered[a:b] for a, b in pairwise(cuts) if b > a]
    else:
        known = {id(param) for param in params}
        chosen = [[param for param in group if id(param) in known] for group in groups]
        named = {id(param) for group in chosen for param in group}
        chosen += _by_size([param for param in reversed(params) if id(param) not in named])
    return [part for group in chosen for part in _by_kind(group)]


def _by_kind(params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    return list(kinds.values())


def _by_size(params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    out: list[list[torch.Tensor]] = []
    for kind in _by_kind(params):
        bucket: list[torch.Tensor] = []
        filled = 0
        for param in kind:
            bucket.append(param)
            filled += param.numel() * param.element_size()
            if filled >= (BUCKET_BYTES if out else FIRST_BUCKET_BYTES):
                out.append(bucket)
                bucket, filled = [], 0
        if bucket:
            out.append(bucket)
    return out

"""Buffers of a model, such as running means, that shards of a batch change one after another, on whatever worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from spark_elastic.errors import UsageError

_EXACT_IN_FLOAT64 = 2.0**53


class ShardBuffers:
    """Lets each shard start from the buffers before the step, and combines what the shards leave in them.

    The running statistics of batch normalisation are updated by one shard after another, in the order of the shards.
    The changes of integers, such as counters, are added up. Any other buffer must be left with the same value by all
    shards. `gather` sums a float64 matrix over the workers, in place: a row for each shard, which is 0 on all workers
    but one.
    """

    def __init__(self, model: torch.nn.Module, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._model = model
        self._gather = gather
        self._norms: list[Any] = []
        self._others: list[tuple[str, torch.nn.Module, str, torch.Tensor]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id of a buffer: itself, and a copy of it before the step."""
        self._left: dict[int, list[torch.Tensor]] = {}
        """By shard: what it has left in `_others`."""

    def begin_step(self) -> int:
        """Copy the buffers before the first shard; return the length of the vectors of `end_shard`."""
        self._norms, self._others, self._before, self._left = [], [], {}, {}
        known: set[int] = set()
        for name, module in self._model.named_modules():
            if not module._buffers:
                continue
            norm = _tracks_statistics(module)
            if norm:
                self._norms.append(module)
            for key, buffer in module._buffers.items():
                if buffer is None or id(buffer) in known:
                    continue
                known.add(id(buffer))
                self._before[id(buffer)] = buffer, buffer.detach().clone()
                if not norm:
                    self._others.append((f"{name}.{key}" if name else key, module, key, buffer))
        return sum(1 + 2 * norm.num_features for norm in self._norms) + len(self._others)

    def begin_shard(self) -> None:
        """Give all buffers the values from before the step."""
        for _, module, key, buffer in self._others:
            module._buffers[key] = buffer
        for buffer, before in self._before.values():
            buffer.copy_(before)

    def end_shard(self, shard: int) -> torch.Tensor:
        """Return what the shard has changed, a float64 vector: statistics, and a flag for each other buffer."""
        parts = []
        for norm in self._norms:
            passes = float(norm.num_batches_tracked - self._before[id(norm.num_batches_tracked)][1])
            parts += [torch.tensor([passes]), norm.running_mean, norm.running_var]
        left = []
        for name, module, key, buffer in self._others:
            now = module._buffers[key]
            if now is None or now.shape != buffer.shape or now.dtype != buffer.dtype:
                raise UsageError(f"a shard has given the buffer {name} another shape or type; {_ADVICE}")
            left.append(now)
        changed = [
            float(not _same(now, self._before[id(buffer)][1]))
            for now, (*_, buffer) in zip(left, self._others, strict=True)
        ]
        if any(changed):
            self._left[shard] = [now.detach().clone() for now in left]
        parts.append(torch.tensor(changed))
        return torch.cat([part.detach().double().reshape(-1) for part in parts])

    put_back = begin_shard
    """Used after a step that has failed or did not train."""

    def combine(self, rows: torch.Tensor, present: Sequence[int]) -> None:
        """Set the buffers to what all shards have left: `rows` are their vectors, `present` the shards that have rows.

        Raises:
            UsageError: Shards have left different values in a buffer that cannot be combined.
            HorovodInternalError: A peer is gone.
        """
        flags = rows[:, rows.shape[1] - len(self._others) :]
        contents = self._contents(present) if bool(flags.any()) else None
        self.begin_shard()
        at = 0
        for norm in self._norms:
            end = at + 1 + 2 * norm.num_features
            self._combine_norm(norm, [rows[shard, at:end] for shard in present])
            at = end
        if contents is not None:
            for (name, _, _, buffer), values in zip(self._others, contents, strict=True):
                self._combine_other(name, buffer, [values[shard] for shard in present])

    def _combine_norm(self, norm: Any, shards: Sequence[torch.Tensor]) -> None:
        counted, first = norm.num_batches_tracked, float(norm.num_batches_tracked)
        with torch.no_grad():
            for shard in shards:
                passes = float(shard[0])
                if not passes:
                    continue
                for buffer, left in zip((norm.running_mean, norm.running_var), shard[1:].chunk(2), strict=True):
                    before = self._before[id(buffer)][1]
                    if norm.momentum is None:  # the average of all passes so far
                        count = float(counted)
                        total = buffer.double() * count + left * (first + passes) - before.double() * first
                        buffer.copy_(total / (count + passes))
                    else:  # the shard has moved the old value by the same rate, from where the step has begun
                        buffer.copy_(left.to(buffer.dtype) + (buffer - before) * (1.0 - norm.momentum) ** passes)
                counted.add_(int(passes))

    def _contents(self, present: Sequence[int]) -> list[torch.Tensor]:
        """Return what all shards have left in each other buffer: a float64 matrix with a row for each shard."""
        for name, _, _, buffer in self._others:
            if buffer.is_complex():
                raise UsageError(f"the buffer {name} is complex, and was changed in a shard; {_ADVICE}")
        sizes = [buffer.numel() for *_, buffer in self._others]
        matrix = torch.zeros((max(present) + 1, sum(sizes) + 1), dtype=torch.float64)
        for shard, left in self._left.items():
            matrix[shard, :-1] = torch.cat([each.double().reshape(-1) for each in left])
            matrix[shard, -1] = 1.0
        self._gather(matrix)
        before = [self._before[id(buffer)][1] for *_, buffer in self._others]
        unchanged = torch.cat([each.double().reshape(-1) for each in before]) + 0.0
        matrix[:, :-1] = torch.where(matrix[:, -1:] > 0, matrix[:, :-1], unchanged)
        return list(matrix[:, :-1].split(sizes, dim=1))

    def _combine_other(self, name: str, buffer: torch.Tensor, left: Sequence[torch.Tensor]) -> None:
        before = self._before[id(buffer)][1].double().reshape(-1)
        total = left[0]
        if not (buffer.is_floating_point() or buffer.dtype == torch.bool):
            total = before + sum((each - before for each in left), torch.zeros_like(before))
            if bool((total.abs() >= _EXACT_IN_FLOAT64).any()):
                raise UsageError(f"the buffer {name} counts beyond 2**53, which cannot be added up exactly")
        elif not all(_same(each, left[0]) for each in left):
            raise UsageError(
                f"the shards of a batch have left different values in the buffer {name}, and no rule says how to "
                f"combine them; {_ADVICE}"
            )
        with torch.no_grad():
            buffer.copy_(total.reshape(buffer.shape))


_ADVICE = (
    "only the running statistics of BatchNorm1d, 2d and 3d and integer counters can depend on a shard's rows: update "
    "others after the shards, from values that are the same on all workers"
)


def _tracks_statistics(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, _BatchNorm)
        and type(module).forward is _BatchNorm.forward
        and module.running_mean is not None
        and module.running_var is not None
        and module.num_batches_tracked is not None
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same values; a NaN is the same as another."""
    return bool(((one == other) | ((one != one) & (other != other))).all())

"""`SyncBatchNorm`: batch normalisation with the mean and variance of all ranks' rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from spark_elastic.collective.batch_statistics import (
    is_without_rows,
    normalised_group,
    sum_over_group,
    sums_in_backward,
)
from spark_elastic.collective.group import Group
from spark_elastic.collective.process_sets import ProcessSet, global_process_set


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the rows of all ranks, for inputs of shape [rows, channels, ...].

    In training, mean and variance are computed over the rows of all members, whose numbers may differ between ranks and
    may be 0; gradients flow through them. All members must call the layer equally often, and its backward too. In eval
    mode, and in a world of one, it is exactly `torch.nn.BatchNorm1d`, 2d or 3d. Each call uses the members of the
    present world.

    `forward` raises HorovodInternalError if a peer is gone, with unchanged running statistics, and ValueError if all
    ranks together have one value per channel, which has no variance.

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: the weight of a new value in the running statistics; None: their cumulative average.
        affine: have a weight and a bias.
        track_running_stats: keep running statistics, which eval mode uses.
        process_set: the processes whose rows are normalised together.
        device: the device of parameters and buffers.
        dtype: the type of parameters and buffers.
    """

    _process_set: ProcessSet = global_process_set
    """Of the class unless it is another one, because a copy of the layer has copies of its attributes."""
    single_value_is_normalised = False
    """Normalise a single value per channel by the running statistics, if they are kept, instead of raising."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if process_set is not global_process_set:
            self._process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Convert the batch normalisation layers in a module to synchronised ones, in place.

        Parameters, buffers and hooks are kept, so an optimizer on the parameters stays valid and `state_dict` keeps its
        keys; a layer remains an instance of its former class. Layers whose class overrides `forward` cannot be
        converted and are left as they are, see `unconverted`.

        Returns:
            The module.
        """
        layer: Any
        for layer in module.modules():
            if _is_convertible(layer):
                layer.__class__ = _synchronised(layer.__class__)
                if process_set is not global_process_set:
                    layer._process_set = process_set
        return module

    @property
    def takes_part(self) -> bool:
        """True if a call of the layer now would use the rows of other ranks too."""
        return self.training and self._group() is not None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, [rows, channels, ...]; got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = self._group() if self.training else None
        if group is None:
            return super().forward(input)
        self._check_input_dim(input)
        counts = not is_without_rows()
        count, mean, var = _statistics(group, input.detach(), counts)
        if count == 1 and self.single_value_is_normalised and self.running_mean is not None:
            statistics = self.running_mean, self.running_var
            return torch.nn.functional.batch_norm(input, *statistics, self.weight, self.bias, False, 0.0, self.eps)
        if count == 1:
            raise ValueError(
                f"expected more than 1 value per channel when training; all {group.size} ranks together have 1, and "
                f"this rank's input is of shape {tuple(input.shape)}"
            )
        if self.track_running_stats and self.running_mean is not None and count:
            self._update_running(count, mean, var)
        return _Normalise.apply(input, self.weight, self.bias, mean, var, count, self.eps, group, counts)

    def _group(self) -> Group | None:
        return normalised_group(self._process_set)

    def _update_running(self, count: int, mean: torch.Tensor, var: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked or 1)
        with torch.no_grad():
            self.running_mean.mul_(1 - factor).add_(mean.to(self.running_mean.dtype), alpha=factor)
            unbiased = (var.double() * (count / (count - 1))).to(self.running_var.dtype)
            self.running_var.mul_(1 - factor).add_(unbiased, alpha=factor)


def unconverted(module: torch.nn.Module) -> list[str]:
    """Return the names of layers with batch statistics that `convert_sync_batchnorm` leaves as they are."""
    return [
        f"{name or 'the model itself'} ({_scripted(each) or type(each).__name__})"
        for name, each in module.named_modules()
        if is_batch_norm(each) and not isinstance(each, SyncBatchNorm) and not _is_convertible(each)
    ]


def is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or _scripted(module).startswith("scripted BatchNorm")


def _scripted(module: torch.nn.Module) -> str:
    """Return the former class of a module that TorchScript has compiled or traced; "" for others."""
    return f"scripted {getattr(module, 'original_name', '')}" if isinstance(module, torch.jit.ScriptModule) else ""


# --- conversion -----------------------------------------------------------------------------------


def _is_convertible(layer: torch.nn.Module) -> bool:
    kind = type(layer)
    if not isinstance(layer, _BatchNorm) or isinstance(layer, (SyncBatchNorm, LazyModuleMixin)):
        return False
    own_forward = kind.forward is not _BatchNorm.forward or "forward" in layer.__dict__
    return kind is torch.nn.SyncBatchNorm or not own_forward


@functools.cache
def _synchronised(kind: Any) -> type[SyncBatchNorm]:
    """Return the class that derives from `SyncBatchNorm` and from `kind`."""
    if kind is torch.nn.SyncBatchNorm:
        return SyncBatchNorm

    def reduced(self: SyncBatchNorm, protocol: Any) -> Any:  # pickle could not find the class by its name
        return _empty, (kind,), self.__dict__

    body = {
        "_check_input_dim": kind._check_input_dim,
        "__reduce_ex__": reduced,
        "__module__": kind.__module__,
        "__doc__": f"A `{kind.__name__}` that was converted.",
    }
    return type(f"Sync{kind.__name__}", (SyncBatchNorm, kind), body)


def _empty(kind: Any) -> SyncBatchNorm:
    made = _synchronised(kind)
    return made.__new__(made)


# --- statistics -----------------------------------------------------------------------------------


def _statistics(group: Group, input: torch.Tensor, counts: bool) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the number of values per channel over all members, and their mean and biased variance, shape (channels,).

    Each member computes the variance about its own mean; they are merged in float64, which is exact enough for inputs
    with fewer bits. For float64 inputs, deviations are taken from the common mean, which needs two reductions.
    """
    channels = input.shape[1]
    own = input.numel() // channels if counts and input.numel() else 0
    values = _wide(input)
    mean = var = torch.zeros(channels, dtype=torch.float64, device=input.device)
    if own:
        # much faster on a CPU than torch.var_mean, and what batch_norm itself calls
        mean, var = (each.double() for each in torch.ops.aten.batch_norm_update_stats(values, None, None, 0.0))
    count = torch.full((1,), float(own), dtype=torch.float64, device=input.device)
    if values.dtype == torch.float64:
        total, sums = sum_over_group(group, torch.cat([count, mean * own])).split([1, channels])
        common = sums / total.clamp(min=1)
        squares = sum_over_group(group, (var + (mean - common).square()) * own)
        merged = squares / total.clamp(min=1)
    else:
        numbers = torch.cat([count, mean * own, (var + mean.square()) * own])
        total, sums, squares = sum_over_group(group, numbers).split([1, channels, channels])
        common = sums / total.clamp(min=1)
        merged = (squares / total.clamp(min=1) - common.square()).clamp_(min=0)
    return int(total.item()), common.to(values.dtype), merged.to(values.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class _Normalise(Function):
    """Batch normalisation by mean and variance of all members' rows, with the gradient through both.

    `rest` are the number of values per channel, the layer's eps, the group, and True if this rank's rows count.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, var)
        ctx.rest = rest
        if ctx.needs_input_grad[0]:
            sums_in_backward.add(ctx)
        if not input.numel():
            return torch.empty_like(input)
        scale, shift = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        out = torch.nn.functional.batch_norm(_wide(input), mean, var, scale, shift, False, 0.0, rest[1])
        return out.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight, mean, var = ctx.saved_tensors
        count, eps, group, counts = ctx.rest
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        values, given = _wide(input), _wide(grad)
        of_input = given
        of_weight = of_bias = torch.zeros_like(mean)
        if input.numel():
            of_input, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                given, values, scale, mean, var, None, None, False, eps, [ctx.needs_input_grad[0], True, True]
            )
        if not counts:  # the substitute rows have no gradient
            of_input, of_weight, of_bias = torch.zeros_like(given), torch.zeros_like(mean), torch.zeros_like(mean)
        if ctx.needs_input_grad[0]:
            sums_in_backward.discard(ctx)
            sums = sum_over_group(group, torch.cat([of_bias, of_weight]).double())
            if counts and input.numel():
                of_bias_all, of_weight_all = sums.div_(count).chunk(2)
                inverse = (var.double() + eps).rsqrt()
                slope = -scale * inverse.square() * of_weight_all
                level = -scale * inverse * of_bias_all
                shape = (1, -1) + (1,) * (input.dim() - 2)
                mean, slope, level = (each.to(mean.dtype).view(shape) for each in (mean, slope, level))
                of_input = of_input.addcmul_(values - mean, slope).add_(level)
            of_input = of_input.to(input.dtype)
        of_parameters = (
            each.to(weight.dtype) if needed else None
            for each, needed in zip((of_weight, of_bias), ctx.needs_input_grad[1:3], strict=True)
        )
        return (of_input if ctx.needs_input_grad[0] else None, *of_parameters, *(None,) * 6)

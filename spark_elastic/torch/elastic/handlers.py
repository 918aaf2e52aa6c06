"""Handlers for the values of a `TorchState`: modules, optimizers, samplers, and objects with a `state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spark_elastic.elastic.handlers import HasStateDict, Layout, StateDictHandler, StateHandler, TensorSpec, copy_all
from spark_elastic.elastic.plain_values import independent_copy
from spark_elastic.errors import UsageError
from spark_elastic.torch.elastic.sampler import ElasticSampler


class ModelStateHandler(StateHandler):
    """Parameters and buffers of a module; extra state of modules belongs to the light part."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._buffers: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] | None = None
        self._modules: list[torch.nn.Module] | None = None
        plain = torch.nn.Module.get_extra_state
        self._has_extra = any(type(module).get_extra_state is not plain for module in value.modules())

    def save(self) -> None:
        self._modules = None
        super().save()
        buffers = self.buffers()
        if [b.shape for b in self._buffers] != [b.shape for b in buffers]:
            self._buffers = [buffer.detach().clone() for buffer in buffers]
        else:
            copy_all(self._buffers, buffers)

    def set_value(self, value: Any) -> None:
        self._parameters = None
        super().set_value(value)

    def restore(self) -> None:
        super().restore()
        copy_all(self.buffers(), self._buffers)

    def _own(self) -> dict[str, Any]:
        return dict(self.value.state_dict(keep_vars=True))

    def layout(self) -> Layout:
        return self.present()[0]

    def present(self) -> tuple[Layout, list[torch.Tensor]]:
        own = {key: value for key, value in self._own().items() if isinstance(value, torch.Tensor)}
        return [TensorSpec(key, tuple(value.shape), value.dtype, False) for key, value in own.items()], list(
            own.values()
        )

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        own = self._own()
        out = []
        for key, shape, dtype, _ in layout:
            tensor = own.get(key)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                have = "no such tensor" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise UsageError(
                    f"the model of this worker differs from the others': {key} is {shape} {dtype} there, and {have} "
                    "here; build the same model on every worker"
                )
            out.append(tensor)
        return out

    def light(self) -> Any:
        if not self._has_extra:
            return {}
        extra = {key: value for key, value in self._own().items() if not isinstance(value, torch.Tensor)}
        return independent_copy(extra)

    def set_light(self, light: Any) -> None:
        if light:
            self.value.load_state_dict(light, strict=False)

    def versions(self) -> list[int]:
        """Return torch's counter of in-place changes of each parameter."""
        if self._parameters is None:
            self._parameters = list(self.value.parameters())
        return [0 if param.is_inference() else param._version for param in self._parameters]

    def buffers(self) -> list[torch.Tensor]:
        """Return what a forward pass may change: running means and the like.

        Called after each step, so the tree of modules is walked at commits only.
        """
        if self._modules is None:
            self._modules = list(self.value.modules())
        return [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]


class OptimizerStateHandler(StateHandler):
    """An optimizer: its state is tensors; its options, and state of other types, are light."""

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.value.param_groups for param in group["params"]]

    def layout(self) -> Layout:
        return self.present()[0]

    def present(self) -> tuple[Layout, list[torch.Tensor]]:
        layout, tensors = [], []
        state = self.value.state
        for index, param in enumerate(self._params()):
            for name, value in state[param].items() if param in state else ():
                if isinstance(value, torch.Tensor):
                    layout.append(
                        TensorSpec((index, name), tuple(value.shape), value.dtype, value.device != param.device)
                    )
                    tensors.append(value)
        return layout, tensors

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        params = self._params()
        state = self.value.state
        wanted: dict[int, dict[str, TensorSpec]] = {}
        for piece in layout:
            wanted.setdefault(piece.key[0], {})[piece.key[1]] = piece
        if wanted and max(wanted) >= len(params):
            raise UsageError(
                f"the optimizer of this worker has {len(params)} parameters and another's has more; build the same "
                "optimizer on every worker"
            )
        for index, param in enumerate(params):
            self._shape(state, param, wanted.get(index, {}))
        return [state[params[piece.key[0]]][piece.key[1]] for piece in layout]

    @staticmethod
    def _shape(state: Any, param: torch.Tensor, wanted: Mapping[str, TensorSpec]) -> None:
        own = state.get(param, {})
        for name in [name for name, value in own.items() if isinstance(value, torch.Tensor) and name not in wanted]:
            del own[name]
        if not wanted and not own:
            state.pop(param, None)
        for name, piece in wanted.items():
            value = own.get(name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != piece.shape or value.dtype != piece.dtype:
                device = torch.device("cpu") if piece.on_cpu else param.device
                if piece.shape == tuple(param.shape):  # the parameter's memory layout, as optimizers make it
                    fresh = torch.empty_like(param, dtype=piece.dtype, device=device, requires_grad=False)
                else:
                    fresh = torch.empty(piece.shape, dtype=piece.dtype, device=device)
                state[param][name] = fresh.detach()

    def light(self) -> Any:
        groups = [
            {key: independent_copy(value) for key, value in group.items() if key != "params"}
            for group in self.value.param_groups
        ]
        state = self.value.state
        plain = {
            (index, name): independent_copy(value)
            for index, param in enumerate(self._params())
            if param in state
            for name, value in state[param].items()
            if not isinstance(value, torch.Tensor)
        }
        return groups, plain

    def set_light(self, light: Any) -> None:
        groups, plain = light
        own = self.value.param_groups
        if len(own) != len(groups):
            raise UsageError(
                f"the optimizer of this worker has {len(own)} parameter groups and another's has {len(groups)}; build "
                "the same optimizer on every worker"
            )
        for group, options in zip(own, groups, strict=True):
            group.update(independent_copy(options))
        params, state = self._params(), self.value.state
        for index, param in enumerate(params):
            if param in state:
                have = state[param]
                for name in [n for n, v in have.items() if not isinstance(v, torch.Tensor) and (index, n) not in plain]:
                    del have[name]
        for (index, name), value in plain.items():
            state[params[index]][name] = independent_copy(value)


class SamplerStateHandler(StateHandler):
    """An `ElasticSampler`, which has a light part only."""

    def light(self) -> Any:
        return dict(self.value.state_dict())

    def set_light(self, light: Any) -> None:
        self.value.load_state_dict(dict(light))

    def reset(self) -> None:
        self.value.reset()


Registry = list[tuple[Any, type[StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (HasStateDict, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return the (type, handler class) pairs, of which the first that fits a value is used; it may be changed."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the registry."""
    global _registry
    _registry = registry


def register_handler(kind: type, handler: type[StateHandler]) -> None:
    """Use `handler` for values of `kind`, before all others."""
    _registry.insert(0, (kind, handler))


def handler_for(value: Any) -> StateHandler | None:
    """Return a handler for the value; None for a plain Python object."""
    if isinstance(value, type):
        return None
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None

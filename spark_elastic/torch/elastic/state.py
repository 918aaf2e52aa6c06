"""TorchState: models, optimizers, samplers and plain values that outlive a change of the world.

Two strategies make it of an `ElasticState`: handlers, which copy and send values by type, and `TorchOptimizerSteps`,
which observes what has changed since the last mark.
"""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from spark_elastic.elastic.handlers import (
    Handlers,
    HasStateDict,
    Layout,
    StateDictHandler,
    StateHandler,
    TensorSpec,
    copy_all,
)
from spark_elastic.elastic.mark import OptimizerSteps, StepCounter
from spark_elastic.elastic.plain_values import independent_copy
from spark_elastic.elastic.state import ElasticState
from spark_elastic.errors import UsageError
from spark_elastic.torch.elastic.sampler import ElasticSampler
from spark_elastic.torch.elastic.virtual_shards import VirtualWorkers
from spark_elastic.torch.optimizer import DistributedOptimizerMixin

log = logging.getLogger("spark_elastic.torch")


class ModelStateHandler(StateHandler):
    """The handler of a module. Its tensors are parameters and buffers, its light part the extra state of modules."""

    observed = True

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
        layout = [TensorSpec(key, tuple(value.shape), value.dtype, False) for key, value in own.items()]
        return layout, list(own.values())

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
        """Return the buffers, such as running means, which a forward pass may change.

        This is called at each mark, so the list of modules is updated at commits only.
        """
        if self._modules is None:
            self._modules = list(self.value.modules())
        return [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]


class OptimizerStateHandler(StateHandler):
    """The handler of an optimizer. Its tensors are those of its state; options and other state are its light part."""

    observed = True

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._room: dict[Any, list[torch.Tensor]] = {}
        """Tensors whose memory is mapped already, by `_kind`; see `make_room`."""

    def make_room(self) -> None:
        """Allocate the tensors of the state that is taken over next, and of its copy, before other members wait.

        At its first use, memory takes longer to map than to fill.
        """
        for param, names in zip(self._params(), _tensors_per_parameter(self.value), strict=True):
            if param.device.type == "cpu":
                for dtype in [*names, *names]:
                    fresh = torch.empty_like(param, dtype=dtype, requires_grad=False).detach()
                    self._room.setdefault(_kind(fresh), []).append(fresh.zero_())

    def clear_room(self) -> None:
        """Free what `make_room` has allocated and nothing has used."""
        self._room = {}

    def _new_like(self, tensor: torch.Tensor) -> torch.Tensor:
        room = self._room.get(_kind(tensor)) if tensor.device.type == "cpu" else None
        return room.pop() if room else super()._new_like(tensor)

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

    def _shape(self, state: Any, param: torch.Tensor, wanted: Mapping[str, TensorSpec]) -> None:
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
                    model = torch.empty_like(param, dtype=piece.dtype, device="meta", requires_grad=False)
                    room = self._room.get(_kind(model)) if device.type == "cpu" else None
                    fresh = room.pop() if room else torch.empty_like(model, device=device)
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


def _kind(tensor: torch.Tensor) -> Any:
    """Return what two tensors on the CPU have to share so that one can be used in place of the other."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _tensors_per_parameter(optimizer: torch.optim.Optimizer) -> list[list[torch.dtype]]:
    """Return the types of the tensors that an optimizer of torch keeps for each parameter, of that parameter's shape.

    A copy of the optimizer makes a step on parameters of two elements. Optimizers of others may do anything in a step,
    so they count as having none.
    """
    inner = optimizer._inner if isinstance(optimizer, DistributedOptimizerMixin) else optimizer
    kind, params = type(inner), [param for group in inner.param_groups for param in group["params"]]
    nothing: list[list[torch.dtype]] = [[] for _ in params]
    if not kind.__module__.startswith("torch.optim.") or kind is torch.optim.LBFGS or inner.state:
        return nothing
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return nothing
    small = {id(param): torch.nn.Parameter(torch.zeros(2, dtype=param.dtype), param.requires_grad) for param in params}
    for param in small.values():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    copied = kind.__new__(kind)
    copied.__dict__.update({name: value for name, value in inner.__dict__.items() if name != "step"})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        copied.__dict__[hooks] = OrderedDict()
    copied.state = defaultdict(dict)
    copied.param_groups = [
        {**group, "params": [small[id(param)] for param in group["params"]]} for group in inner.param_groups
    ]
    copied.step()
    return [
        [value.dtype for value in copied.state[small[id(param)]].values() if getattr(value, "shape", None) == (2,)]
        for param in params
    ]


class SamplerStateHandler(StateHandler):
    """The handler of an `ElasticSampler`, which has a light part only."""

    def light(self) -> Any:
        return dict(self.value.state_dict())

    def set_light(self, light: Any) -> None:
        self.value.load_state_dict(dict(light))

    def reset(self) -> None:
        self.value.reset()


class VirtualWorkersHandler(StateHandler):
    """The handler of virtual workers, which has a light part only: random states, which change with each step."""

    def light(self) -> Any:
        return self.value.state_dict()

    def set_light(self, light: Any) -> None:
        self.value.load_state_dict(light)


Registry = list[tuple[Any, type[StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (VirtualWorkers, VirtualWorkersHandler),
    (HasStateDict, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return the (type, handler class) pairs, a list that may be changed; the first pair that fits a value is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the list that `get_handler_registry` returns."""
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


class TorchState(ElasticState):
    """Models, optimizers, samplers, schedulers and plain values, each a keyword argument and then an attribute.

    The type of a value decides which handler copies it, see `register_handler`; a value without a handler is a plain
    Python value, which must be picklable.

    Args:
        model: A module, or None.
        optimizer: A torch optimizer or `DistributedOptimizer`, or None.
        kwargs: More of the same, and anything else to keep.
    """

    model: Any
    optimizer: Any

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(handler_for, TorchOptimizerSteps, {"model": model, "optimizer": optimizer, **kwargs})


class TorchOptimizerSteps(OptimizerSteps):
    """Observes torch's optimizers by their hooks, and parameters by torch's counters of in-place changes.

    The hooks refer to this object weakly, because an optimizer may outlive its state.

    Args:
        observes_parameters: Parameters that were written to since the mark count as changed. False for loops, such as
            the estimators', which can repeat all that they write besides their optimizer's steps.
    """

    def __init__(self, handlers: Handlers, counter: StepCounter, observes_parameters: bool = True) -> None:
        super().__init__(handlers, counter)
        self._observes_parameters = observes_parameters
        self._hooks: dict[str, list[Any]] = {}
        self._begun = False
        """An optimizer has begun a step since the mark: a `DistributedOptimizer` when it has reduced the gradients."""
        self._versions: list[int] = []
        """The counters of in-place changes at the mark."""
        self._buffers: dict[str, list[torch.Tensor]] = {}
        """Copies of each model's buffers at the mark."""

    def attach(self, name: str) -> None:
        handler = self._handlers.by_name[name]
        if isinstance(handler, OptimizerStateHandler):
            self._hook(name, handler.value)
        # with several passes a loop divides each batch into parts; all ranks must have equally many parts
        passes = max((each.backward_passes_per_step for each in self._distributed()), default=1)
        for sampler in self._handlers.of(SamplerStateHandler).values():
            sampler.value.split_batches(passes)

    def passes_begun(self) -> int:
        return max(
            (each.backward_passes_per_step for each in self._distributed() if each._reducer.accumulating), default=0
        )

    def mark(self) -> None:
        self._begun = False
        self._versions = self._parameter_versions()
        for name, handler in self._handlers.of(ModelStateHandler).items():
            buffers, copies = handler.buffers(), self._buffers.get(name, [])
            if [c.shape for c in copies] == [b.shape for b in buffers]:
                copy_all(copies, buffers)
            else:
                self._buffers[name] = [buffer.detach().clone() for buffer in buffers]

    def undo(self, plain: dict[str, Any]) -> str:
        for handler in self._handlers.of(OptimizerStateHandler).values():
            if isinstance(handler.value, DistributedOptimizerMixin):
                handler.value._reducer.abandon()
            else:
                handler.value.zero_grad(set_to_none=True)
        if changed := super().undo(plain):
            return changed
        if self._begun:
            return "an optimizer has begun a step since the last mark"
        if self._observes_parameters and self._versions != self._parameter_versions():
            return "parameters were written to since the last mark"
        for name, model in self._handlers.of(ModelStateHandler).items():
            copy_all(model.buffers(), self._buffers.get(name, []))
        return ""

    def _parameter_versions(self) -> list[int]:
        if not self._observes_parameters:
            return []
        return [number for handler in self._handlers.of(ModelStateHandler).values() for number in handler.versions()]

    def _hook(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        for hook in self._hooks.pop(name, ()):
            hook.remove()
        self._counter.steps[name] = 0
        owner = weakref.ref(self)

        def begins(*_: Any) -> None:
            if (steps := owner()) is not None:
                steps._begun = True

        def stepped(*_: Any) -> None:
            if (steps := owner()) is not None:
                steps._counter.stepped(name)

        if isinstance(optimizer, DistributedOptimizerMixin):  # a closure is called, and may fail, after its pre-hooks
            before: Any = _ListEntry(optimizer._reducer.on_reduced, begins)
        else:
            before = optimizer.register_step_pre_hook(begins)
        self._hooks[name] = [before, optimizer.register_step_post_hook(stepped)]

    def _distributed(self) -> list[Any]:
        values = [handler.value for handler in self._handlers.of(OptimizerStateHandler).values()]
        return [value for value in values if isinstance(value, DistributedOptimizerMixin)]


class _ListEntry:
    """Adds a function to a list; `remove` removes it, as it does for the handles of torch's hooks."""

    def __init__(self, functions: list[Callable[[], None]], function: Callable[[], None]) -> None:
        self._functions, self._function = functions, function
        functions.append(function)

    def remove(self) -> None:
        self._functions.remove(self._function)

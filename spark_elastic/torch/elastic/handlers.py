"""How the values of a `TorchState` are copied, put back and taken over from another member, by type.

Each value has two parts. The *light* part is plain data that is cheap to copy at every resume point: a learning rate,
a position in the data. The *tensors* are copied at commits only. A layout says which tensors there are, so that they
can be asked for elsewhere: in the copy, or on a member that has none of them yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spark_elastic.errors import UsageError
from spark_elastic.state import independent_copy
from spark_elastic.torch.elastic.sampler import ElasticSampler
from spark_elastic.torch.objects import broadcast_object, broadcast_tensors
from spark_elastic.torch.process_sets import ProcessSet, global_process_set


class Slice(NamedTuple):
    """One tensor of a layout. key: names it within the value. on_cpu: it is not on its parameter's device."""

    key: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


Layout = list[Slice]


class StateHandler:
    """One attribute of a `TorchState`. Subclass it, with `light` and `set_light` or with tensors too, and register it.

    A subclass written for Horovod, with `save`, `restore` and `sync` of its own, works as well.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._layout: Layout = []
        self._copies: list[torch.Tensor] = []
        self._light: Any = None
        self._unfinished = False

    # --- what a subclass defines --------------------------------------------------------------

    def light(self) -> Any:
        """The plain part: picklable, and not changed by anything that later happens to the value."""
        return None

    def set_light(self, light: Any) -> None:
        """Put a plain part back; it must not be changed by what later happens to the value."""

    def layout(self) -> Layout:
        """The tensors that the value has now."""
        return []

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        """The value's own tensors of this layout, created where missing; those not in it are dropped.

        Raises: UsageError: the value cannot have these tensors.
        """
        return []

    def reset(self) -> None:
        """Rank or size have changed."""

    # --- what a state calls -------------------------------------------------------------------

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Copy the value, into the buffers of the last time where they fit."""
        self.begin_save()
        self.finish_save()

    def begin_save(self) -> None:
        """Copy what can change before the optimizer's next step; `finish_save` copies the rest until then."""
        self._light = self.light()
        self._unfinished = True

    def finish_save(self) -> None:
        """Copy the tensors that `begin_save` has left out."""
        if not self._unfinished:
            return
        self._unfinished = False
        layout = self.layout()
        tensors = self.tensors(layout)
        if layout != self._layout or not _same_devices(self._copies, tensors):
            self._copies = [torch.empty_like(tensor, memory_format=torch.preserve_format) for tensor in tensors]
            self._layout = layout
        copy_all(self._copies, tensors)

    def restore(self) -> None:
        """Return to the last `save`."""
        self.finish_save()
        copy_all(self.tensors(self._layout), self._copies)
        self.set_light(self._light)

    def sync(self) -> None:
        """Take over the value of rank 0."""
        take_over({"": self}, 0)


def _same_devices(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    return len(copies) == len(tensors) and all(a.device == b.device for a, b in zip(copies, tensors, strict=True))


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, without recording it for autograd."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_([t.detach() for t in targets], [s.detach() for s in sources])


class ModelStateHandler(StateHandler):
    """Parameters and buffers of a module; extra state that modules keep goes with the light part."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._buffers: list[torch.Tensor] = []
        plain = torch.nn.Module.get_extra_state
        self._has_extra = any(type(module).get_extra_state is not plain for module in value.modules())

    def begin_save(self) -> None:
        super().begin_save()
        buffers = self.buffers()
        if [b.shape for b in self._buffers] != [b.shape for b in buffers]:
            self._buffers = [buffer.detach().clone() for buffer in buffers]
        else:
            copy_all(self._buffers, buffers)

    def restore(self) -> None:
        super().restore()
        copy_all(self.buffers(), self._buffers)

    def _own(self) -> dict[str, Any]:
        return dict(self.value.state_dict(keep_vars=True))

    def layout(self) -> Layout:
        return [
            Slice(key, tuple(tensor.shape), tensor.dtype, False)
            for key, tensor in self._own().items()
            if isinstance(tensor, torch.Tensor)
        ]

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

    def buffers(self) -> list[torch.Tensor]:
        """What a forward pass may change: running means and the like."""
        return list(self.value.buffers())


class OptimizerStateHandler(StateHandler):
    """An optimizer: its options are light, its state is tensors and, of other types, light."""

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.value.param_groups for param in group["params"]]

    def layout(self) -> Layout:
        state = self.value.state
        return [
            Slice((index, name), tuple(value.shape), value.dtype, value.device != param.device)
            for index, param in enumerate(self._params())
            if param in state
            for name, value in state[param].items()
            if isinstance(value, torch.Tensor)
        ]

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        params = self._params()
        state = self.value.state
        wanted: dict[int, dict[str, Slice]] = {}
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
    def _shape(state: Any, param: torch.Tensor, wanted: Mapping[str, Slice]) -> None:
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
    """An `ElasticSampler`: all of it is light."""

    def light(self) -> Any:
        return dict(self.value.state_dict())

    def set_light(self, light: Any) -> None:
        self.value.load_state_dict(dict(light))

    def reset(self) -> None:
        self.value.reset()


class StateDictHandler(StateHandler):
    """Anything else with `state_dict` and `load_state_dict`: learning rate schedulers, gradient scalers, metrics."""

    def light(self) -> Any:
        return independent_copy(self.value.state_dict())

    def set_light(self, light: Any) -> None:
        self.value.load_state_dict(independent_copy(light))


class HasStateDict:
    """The registry's entry for objects with `state_dict` and `load_state_dict`, whatever their class."""

    @staticmethod
    def matches(value: Any) -> bool:
        return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


Registry = list[tuple[Any, type[StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (HasStateDict, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """The (type, handler class) pairs; the first whose type fits a value is used. Insert into it to extend it."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the registry."""
    global _registry
    _registry = registry


def register_handler(kind: type, handler: type[StateHandler]) -> None:
    """Use `handler` for values of `kind`, before all others."""
    _registry.insert(0, (kind, handler))


def handler_for(value: Any) -> StateHandler | None:
    """A handler for the value, or None: it is a plain Python object."""
    if isinstance(value, type):
        return None
    for kind, handler in _registry:
        if kind.matches(value) if kind is HasStateDict else isinstance(value, kind):
            return handler(value)
    return None


def take_over(
    handlers: Mapping[str, StateHandler],
    root: int,
    extra: Any = None,
    staged: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make every member's values those of `root`: what there is in one broadcast, then the tensors in few large ones.

    extra: another picklable object; the root's is returned. staged: receive everything before any value is changed, so
    that a root that dies half-way leaves this member's own values whole.

    Raises:
        HorovodInternalError: a peer is gone.
        UsageError: the values of this member cannot hold the root's.
    """
    group = process_set.group()
    if group is None:
        return extra
    am_root = group.rank == root
    offer = None
    if am_root:
        offer = ({name: (h.layout(), h.light()) for name, h in handlers.items()}, extra)
    values, extra = broadcast_object(offer, root, process_set=process_set)
    if am_root:
        broadcast_tensors(_all_tensors(handlers, values), root, process_set)
        return extra
    staging: list[torch.Tensor] | None = None
    if staged:
        pieces = [piece for layout, _ in values.values() for piece in layout]
        staging = [torch.empty(piece.shape, dtype=piece.dtype) for piece in pieces]
        broadcast_tensors(staging, root, process_set)
        copy_all(_all_tensors(handlers, values), staging)
    else:
        broadcast_tensors(_all_tensors(handlers, values), root, process_set)
    for name, (_, light) in values.items():
        handlers[name].set_light(light)
    return extra


def _all_tensors(handlers: Mapping[str, StateHandler], values: Mapping[str, Any]) -> list[torch.Tensor]:
    return [tensor for name, (layout, _) in values.items() for tensor in handlers[name].tensors(layout)]

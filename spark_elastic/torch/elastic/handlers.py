"""Handlers copy, restore and synchronise modules, optimizers, single parameters and samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spark_elastic.elastic.handlers import Layout, StateDictHandler, StateHandler, TensorSpec, copy_all
from spark_elastic.elastic.plain_values import independent_copy, is_atom
from spark_elastic.errors import UsageError
from spark_elastic.torch.elastic.attributes import (
    OF_MODULES,
    OF_OPTIMIZERS,
    ChangedAttributes,
    changed_in_place,
    is_plain,
    model_differs,
    put,
)


class BufferCopies:
    """Copies of the buffers of modules, and these tensors themselves: a forward pass writes to them or replaces them.

    `moved`: parameters that it writes to.

    A buffer that was replaced may share its memory with the user's data, so `restore` never writes to the new tensor.
    """

    def __init__(self, moved: Sequence[torch.Tensor] = ()) -> None:
        self._moved = moved
        self._modules: list[torch.nn.Module] = []
        self._entries: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
        self._copies: list[torch.Tensor] = []

    def save(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = list(modules)
        self._entries = [(m._buffers, name, buffer) for m in modules for name, buffer in m._buffers.items()]
        tensors = self._tensors()
        if [(c.shape, c.dtype, c.device) for c in self._copies] == [(t.shape, t.dtype, t.device) for t in tensors]:
            copy_all(self._copies, tensors)
        else:
            self._copies = [tensor.detach().clone() for tensor in tensors]

    def restore(self) -> None:
        for module in self._modules:
            module._buffers.clear()  # a forward pass may have registered more
        for buffers, name, buffer in self._entries:
            buffers[name] = buffer
        copy_all(self._tensors(), self._copies)

    def _tensors(self) -> list[torch.Tensor]:
        return [*(buffer for *_, buffer in self._entries if buffer is not None), *self._moved]


class ModelTensor(NamedTuple):
    """A tensor of a module, by the module's path within the model and the tensor's name there."""

    module: str
    name: str
    kind: str
    """A parameter or one of three kinds of buffers; or "state_dict", of a `state_dict` of the module's own."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


class ModelStateHandler(StateHandler):
    """The handler of a module. Its tensors are parameters and buffers, also those that are not persistent.

    Its light part is the extra state of modules, which of them are in training mode, which parameters are trained, the
    plain attributes of modules that have changed, and the states of metrics. A forward pass may make, replace or grow
    buffers, so a member that receives the model makes its buffers like those of the sender.
    """

    observed = True

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._buffers = BufferCopies()
        self._attributes = ChangedAttributes(OF_MODULES)
        self._modules: dict[str, torch.nn.Module] | None = None
        self._begin()

    def _begin(self) -> None:
        """Note the buffers and attributes that the model has at first, and if it has a `state_dict` of its own."""
        plain = torch.nn.Module
        self._modules = None
        modules = self._named_modules()
        self._has_extra = any(
            type(module).get_extra_state is not plain.get_extra_state
            or type(module).state_dict is not plain.state_dict
            or type(module)._save_to_state_dict is not plain._save_to_state_dict
            or module._state_dict_hooks
            for module in modules.values()
        )
        for module in modules.values():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.layout is torch.strided:
                    strides = zip(buffer.stride(), buffer.shape, strict=True)
                    if any(stride == 0 and length > 1 for stride, length in strides):  # expanded: cannot be written to
                        module._buffers[name] = buffer.clone()
        self._first_buffers = {id(buffer): buffer for module in modules.values() for buffer in module._buffers.values()}
        for module in modules.values():
            self._attributes.first(module)

    def set_value(self, value: Any) -> None:
        self.value = value
        self._begin()
        self.save()

    def save(self) -> None:
        self._modules = None
        super().save()
        self._buffers.save(self.modules())

    def restore(self) -> None:
        self._modules = None
        self._buffers.restore()
        super().restore()

    def layout(self) -> Layout:
        return self.present()[0]

    def present(self) -> tuple[Layout, list[torch.Tensor]]:
        layout, tensors = [], []
        for key, tensor in self._own().items():
            value = torch.empty(0, device="cpu") if tensor is None else tensor
            if value.layout is not torch.strided:
                raise UsageError(
                    f"{key} of the model is a sparse tensor, which a state cannot keep: register a dense buffer, or "
                    "its indices and values; or make it a plain attribute if it never changes"
                )
            layout.append(TensorSpec(key, tuple(value.shape), value.dtype, False))
            tensors.append(value)
        return layout, tensors

    def _own(self) -> dict[ModelTensor, torch.Tensor | None]:
        own: dict[ModelTensor, torch.Tensor | None] = {}
        self._modules = None
        for path, module in self._named_modules().items():
            for name, param in module._parameters.items():
                if param is not None:
                    own[ModelTensor(path, name, "parameter")] = param
            for name, buffer in module._buffers.items():
                lasting = name not in module._non_persistent_buffers_set
                kind = "empty buffer" if buffer is None else "buffer" if lasting else "buffer that is not persistent"
                own[ModelTensor(path, name, kind)] = buffer
        known = {id(tensor) for tensor in own.values()}
        for name, value in self._extra().items():
            if isinstance(value, torch.Tensor) and id(value) not in known:
                own[ModelTensor("", name, "state_dict")] = value
        return own

    def _extra(self) -> dict[str, Any]:
        """Return the entries of a `state_dict` of the modules' own, without the states of metrics."""
        if not self._has_extra:
            return {}
        states = {f"{path}.{name}" if path else name for path, name in self._metric_states()}
        return {key: value for key, value in self.value.state_dict(keep_vars=True).items() if key not in states}

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        own = self._own()
        modules = self._named_modules()
        layout = [piece._replace(key=ModelTensor(*piece.key)) for piece in layout]  # a file has plain tuples
        wanted = {(piece.key.module, piece.key.name) for piece in layout}
        for key in own:
            if (key.module, key.name) not in wanted and key.kind != "state_dict":
                if key.kind == "parameter":
                    raise model_differs(f"there is no {key}, which is here; commit after each change of the layers")
                del modules[key.module]._buffers[key.name]
        out = []
        for piece in layout:
            module, tensor = modules.get(piece.key.module), own.get(piece.key)
            if module is not None and piece.key.kind not in ("parameter", "state_dict"):
                out.append(self._like(module, piece))
                continue
            if tensor is None or tuple(tensor.shape) != piece.shape or tensor.dtype != piece.dtype:
                have = "no such tensor" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise model_differs(f"{piece.key} is {piece.shape} {piece.dtype} there, and {have} here")
            out.append(tensor)
        return out

    def _like(self, module: torch.nn.Module, piece: TensorSpec) -> torch.Tensor:
        """Return the module's buffer, made like that of `piece`; a new one if a forward pass has replaced it."""
        name, buffers = piece.key.name, module._buffers
        buffer = buffers.get(name)
        if name not in buffers and name in vars(module):  # the forward pass registers what was a plain attribute
            del vars(module)[name]
        if piece.key.kind == "buffer that is not persistent":
            module._non_persistent_buffers_set.add(name)
        if piece.key.kind == "empty buffer":
            buffers[name] = None
            return torch.empty(0, device="cpu")
        if buffer is None or tuple(buffer.shape) != piece.shape or buffer.dtype != piece.dtype:
            some = buffer if buffer is not None else next(iter(self.value.parameters()), None)
            buffer = torch.empty(piece.shape, dtype=piece.dtype, device="cpu" if some is None else some.device)
        elif id(buffer) not in self._first_buffers:  # it may share its memory with the user's data
            buffer = buffer.detach().clone()
        buffers[name] = buffer
        return buffer

    def light(self) -> Any:
        named = self._named_modules()
        modes = [each.training for each in self.modules()], [param.requires_grad for param in self.parameters()]
        metrics = {
            (path, name): independent_copy(vars(named[path])[name])
            for path, name in self._metric_states()
            if name in vars(named[path])
        }
        extra = {key: value for key, value in self._extra().items() if not isinstance(value, torch.Tensor)}
        return independent_copy(extra), modes, self._attributes.copies(named), metrics

    def set_light(self, light: Any) -> None:
        extra, (training, trained), attributes, metrics = light
        if extra:
            self.value.load_state_dict(extra, strict=False)
        self._modules = None
        named = self._named_modules()
        if missing := {path for path, _ in (*attributes, *metrics)} - named.keys():
            raise model_differs(f"the module {min(missing)} there has no counterpart here")
        self._attributes.assign(named, attributes)
        for (path, name), state in metrics.items():
            own = vars(named[path])
            own[name] = put(None, state, getattr(named[path], "device", torch.device("cpu")))
            own["_computed"] = None  # the result of the states before
        modules, params = self.modules(), self.parameters()
        if (len(modules), len(params)) != (len(training), len(trained)):
            return  # the loop has changed the model's structure
        for module, mode in zip(modules, training, strict=True):
            module.training = mode
        for param, flag in zip(params, trained, strict=True):
            if param.requires_grad != flag:
                param.requires_grad_(flag)

    def _named_modules(self) -> dict[str, torch.nn.Module]:
        """Return all modules by path. Each mark calls this, so the dictionary is made at commits only."""
        if self._modules is None:
            self._modules = dict(self.value.named_modules())
        return self._modules

    def _metric_states(self) -> list[tuple[str, str]]:
        """Return the path and the name of the states of torchmetrics' metrics, which are no buffers."""
        metrics = {path: each for path, each in self._named_modules().items() if hasattr(type(each), "add_state")}
        defaults = {path: vars(metric).get("_defaults") for path, metric in metrics.items()}
        return [(path, name) for path, names in defaults.items() if isinstance(names, dict) for name in names]

    def modules(self, anew: bool = False) -> list[torch.nn.Module]:
        """Return all modules; those that were added since the last commit only if `anew`."""
        if anew:
            self._modules = None
        return list(self._named_modules().values())

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, one that several modules share several times."""
        return [param for module in self.modules() for param in module._parameters.values() if param is not None]


class ParameterHandler(StateHandler):
    """The handler of a tensor that is trained, such as a temperature beside the models; it is changed in place."""

    observed = True

    def layout(self) -> Layout:
        return [TensorSpec("value", tuple(self.value.shape), self.value.dtype, False)]

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        if layout != self.layout():
            there = [(piece.shape, piece.dtype) for piece in layout]
            raise UsageError(
                f"a parameter of the state is {tuple(self.value.shape)} {self.value.dtype} on this worker and {there} "
                "on others; make it alike on every worker"
            )
        return [self.value]

    def light(self) -> Any:
        return self.value.requires_grad

    def set_light(self, light: Any) -> None:
        if self.value.requires_grad != light:
            self.value.requires_grad_(light)


class OptimizerStateHandler(StateHandler):
    """The handler of an optimizer. Its tensors are those of its state; options and other state are its light part.

    Optimizers within this one (of Lookahead, SAM) have handlers of their own, whose parts are parts of this handler's.
    Other attributes are part of the light part: plain ones that have changed, and containers of tensors that are not
    parameters. The latter change in steps only, so marks do not copy them.
    """

    observed = True

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._within: dict[str, OptimizerStateHandler] = {}
        self._attributes = ChangedAttributes(OF_OPTIMIZERS)
        self._attributes.first(value)
        self._handlers_within()

    def _handlers_within(self) -> dict[str, OptimizerStateHandler]:
        """Return the handlers of the optimizers within this one, by attribute and, in a collection, position."""
        inner: dict[str, torch.optim.Optimizer] = {}
        for name, value in vars(self.value).items():
            if name in OF_OPTIMIZERS or is_atom(value):
                continue
            if isinstance(value, torch.optim.Optimizer):
                inner[name] = value
            elif isinstance(value, (list, tuple, dict)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                inner |= {f"{name}[{at}]": each for at, each in items if isinstance(each, torch.optim.Optimizer)}
        for name, each in inner.items():
            if name not in self._within or self._within[name].value is not each:
                self._within[name] = OptimizerStateHandler(each)
        return {name: self._within[name] for name in inner}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizer and those within it."""
        inner = self._handlers_within().values()
        return [self.value, *(each for handler in inner for each in handler.optimizers())]

    def metadata(self) -> str:
        return type(self.value).__name__

    def prepare(self, layout: Layout, metadata: Any) -> None:
        if metadata != self.metadata():
            raise UsageError(
                f"the optimizer of this worker is of type {self.metadata()} and the other one of type {metadata}; "
                "build the same optimizer on every worker, and do not replace it in the loop"
            )

    def params(self) -> list[torch.Tensor]:
        return [param for group in self.value.param_groups for param in group["params"]]

    def layout(self) -> Layout:
        return self.present()[0]

    def present(self) -> tuple[Layout, list[torch.Tensor]]:
        layout, tensors = [], []
        for path, part in self._parts().items():
            for index, param in enumerate(part.params()):
                for name, value in part.value.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor):
                        key, on_cpu = (path, index, name), value.device != param.device
                        layout.append(TensorSpec(key, tuple(value.shape), value.dtype, on_cpu))
                        tensors.append(value)
        return layout, tensors

    def _parts(self) -> dict[str, OptimizerStateHandler]:
        """Return this handler and those within it whose optimizers have a state of their own, by path."""
        parts = {"": self}
        for name, handler in self._handlers_within().items():
            if handler.value.state is not self.value.state:
                parts |= {f"{name}.{path}": part for path, part in handler._parts().items()}
        return parts

    def tensors(self, layout: Layout) -> list[torch.Tensor]:
        parts = self._parts()
        params = {path: part.params() for path, part in parts.items()}
        wanted: dict[tuple[str, int], dict[str, TensorSpec]] = {}
        for piece in layout:
            path, index, name = piece.key
            if index >= len(params.get(path, ())):
                raise UsageError(
                    f"the optimizer of this worker has {len(params[''])} parameters and another's has more; build the "
                    "same optimizer on every worker"
                )
            wanted.setdefault((path, index), {})[name] = piece
        for path, part in parts.items():
            for index, param in enumerate(params[path]):
                self._shape(part.value.state, param, wanted.get((path, index), {}))
        return [parts[path].value.state[params[path][index]][name] for path, index, name in (p.key for p in layout)]

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
                    fresh = torch.empty_like(param, dtype=piece.dtype, device=device, requires_grad=False)
                else:
                    fresh = torch.empty(piece.shape, dtype=piece.dtype, device=device)
                state[param][name] = fresh.detach()

    def light(self) -> Any:
        return self._light_part(at_mark=False)

    def light_at_mark(self) -> Any:
        return self._light_part(at_mark=True)

    def _light_part(self, at_mark: bool) -> Any:
        groups = [
            {key: independent_copy(value) for key, value in group.items() if key != "params"}
            for group in self.value.param_groups
        ]
        state = self.value.state
        plain = {
            (index, name): independent_copy(value)
            for index, param in enumerate(self.params())
            if param in state
            for name, value in state[param].items()
            if not isinstance(value, torch.Tensor)
        }
        changed = self._attributes.copies({"": self.value})
        held: Any = self._held()
        held = None if at_mark else independent_copy(held)
        within = {name: handler._light_part(at_mark) for name, handler in self._handlers_within().items()}
        return groups, plain, independent_copy(self._common()), changed, held, within

    def set_light(self, light: Any) -> None:
        groups, plain, common, changed, held, within = light
        own = self.value.param_groups
        if len(own) != len(groups):
            raise UsageError(
                f"the optimizer of this worker has {len(own)} parameter groups and another's has {len(groups)}; build "
                "the same optimizer on every worker"
            )
        params, state = self.params(), self.value.state
        device = params[0].device if params else torch.device("cpu")
        used: set[int] = set()
        for group, options in zip(own, groups, strict=True):
            for name, option in options.items():
                before = group.get(name)
                group[name] = put(None if id(before) in used else before, option, device)  # groups may share a tensor
                used.add(id(before))
        for index, param in enumerate(params):
            if param in state:
                have = state[param]
                for name in [n for n, v in have.items() if not isinstance(v, torch.Tensor) and (index, n) not in plain]:
                    del have[name]
        for (index, name), value in plain.items():
            state[params[index]][name] = independent_copy(value)
        for key in self._common():
            del state[key]
        state.update(independent_copy(common))
        own, first = vars(self.value), self._attributes.first(self.value)
        if held is not None:
            for name in self._held().keys() - held.keys():
                own[name] = independent_copy(first.get(name))
            own.update({name: put(own.get(name), value, device) for name, value in held.items()})
        self._attributes.assign({"": self.value}, changed)
        inner = self._handlers_within()
        for name, part in within.items():
            if name in inner:
                inner[name].set_light(part)

    def _held(self) -> dict[str, Any]:
        """Return attributes with tensors, arrays or generators, but for parameters; UsageError for a mixture."""
        out = {}
        for name, value in vars(self.value).items():
            if name in OF_OPTIMIZERS or is_plain(value) or not (parts := changed_in_place(value)):
                continue
            trained = [isinstance(each, torch.Tensor) and each.requires_grad for each in parts]
            if not any(trained):
                out[name] = value
            elif not all(trained):
                raise UsageError(
                    f"{name} of a {type(self.value).__name__} has parameters and other tensors, so other workers could "
                    "not take it over: keep tensors that belong to a parameter in the optimizer's state[parameter]"
                )
        return out

    def _common(self) -> dict[Any, Any]:
        """Return the state that belongs to no parameter, such as a count of all steps under a string."""
        return {key: value for key, value in self.value.state.items() if not isinstance(key, torch.Tensor)}


class SamplerStateHandler(StateDictHandler):
    """The handler of an `ElasticSampler`."""

    def reset(self) -> None:
        self.value.reset()

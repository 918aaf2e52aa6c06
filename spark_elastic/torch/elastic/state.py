"""TorchState: models, optimizers, samplers and plain values that outlive a change of the world.

Two strategies make it of an `ElasticState`: handlers, which copy and send values by type, and `TorchOptimizerSteps`,
which observes what has changed since the last mark.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spark_elastic.collective.process import process
from spark_elastic.collective.reduction import Max
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
from spark_elastic.torch.optimizer import DistributedOptimizerMixin, stepped
from spark_elastic.torch.replicas import check_equal
from spark_elastic.torch.slots import abandon_steps

log = logging.getLogger("spark_elastic.torch")


class BufferCopies:
    """Copies of the buffers of modules, and these tensors themselves: a forward pass writes to them or replaces them.

    A buffer that was replaced may share its memory with the user's data, so `restore` never writes to the new tensor.
    """

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
        self._copies: list[torch.Tensor] = []

    def save(self, modules: Sequence[torch.nn.Module]) -> None:
        self._places = [(m._buffers, name, buffer) for m in modules for name, buffer in m._buffers.items()]
        tensors = self._tensors()
        if [(c.shape, c.dtype, c.device) for c in self._copies] == [(t.shape, t.dtype, t.device) for t in tensors]:
            copy_all(self._copies, tensors)
        else:
            self._copies = [tensor.detach().clone() for tensor in tensors]

    def restore(self) -> None:
        for buffers, name, buffer in self._places:
            buffers[name] = buffer
        copy_all(self._tensors(), self._copies)

    def _tensors(self) -> list[torch.Tensor]:
        return [buffer for *_, buffer in self._places if buffer is not None]


class ModelStateHandler(StateHandler):
    """The handler of a module. Its tensors are parameters and buffers.

    Its light part is the extra state of modules, which of them are in training mode, and which parameters are trained.
    """

    observed = True

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._buffers = BufferCopies()
        self._modules: list[torch.nn.Module] | None = None
        plain = torch.nn.Module.get_extra_state
        self._has_extra = any(type(module).get_extra_state is not plain for module in value.modules())

    def save(self) -> None:
        self._modules = None
        super().save()
        self._buffers.save(self.modules())

    def restore(self) -> None:
        self._modules = None
        self._buffers.restore()
        super().restore()

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
        modes = [module.training for module in self.modules()], [param.requires_grad for param in self.parameters()]
        if not self._has_extra:
            return {}, modes
        extra = {key: value for key, value in self._own().items() if not isinstance(value, torch.Tensor)}
        return independent_copy(extra), modes

    def set_light(self, light: Any) -> None:
        extra, (training, trained) = light
        if extra:
            self.value.load_state_dict(extra, strict=False)
        self._modules = None
        modules, params = self.modules(), self.parameters()
        if (len(modules), len(params)) != (len(training), len(trained)):
            return  # the loop has changed the model's structure
        for module, mode in zip(modules, training, strict=True):
            module.training = mode
        for param, flag in zip(params, trained, strict=True):
            if param.requires_grad != flag:
                param.requires_grad_(flag)

    def modules(self, anew: bool = False) -> list[torch.nn.Module]:
        """Return all modules. Each mark calls this, so the list is made at commits only, or if `anew` is True."""
        if self._modules is None or anew:
            self._modules = list(self.value.modules())
        return self._modules

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, one that several modules share several times."""
        return [param for module in self.modules() for param in module._parameters.values() if param is not None]


class OptimizerStateHandler(StateHandler):
    """The handler of an optimizer. Its tensors are those of its state; options and other state are its light part."""

    observed = True

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
        return groups, plain, independent_copy(self._common())

    def set_light(self, light: Any) -> None:
        groups, plain, common = light
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
        for key in self._common():
            del state[key]
        state.update(independent_copy(common))

    def _common(self) -> dict[Any, Any]:
        """Return the state that belongs to no parameter, such as a count of all steps under a string."""
        return {key: value for key, value in self.value.state.items() if not isinstance(key, torch.Tensor)}


class SamplerStateHandler(StateHandler):
    """The handler of an `ElasticSampler`, which has a light part only."""

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
        """An optimizer has begun a step since the mark: a `DistributedOptimizer` when it has all reduced gradients."""
        self._written: tuple[list[torch.Tensor], list[int]] = [], []
        """The parameters, and their counters of in-place changes, at the mark."""
        self._unused = 0
        self._compared_in: Callable[[], Any] = lambda: None
        """Returns the group in which the members' models were compared."""
        self._buffers: dict[str, BufferCopies] = {}
        """Copies of each model's buffers at the mark."""

    def attach(self, name: str) -> None:
        handler = self._handlers.by_name[name]
        if isinstance(handler, OptimizerStateHandler):
            self._hook(name, handler.value)
        # with several passes a loop divides each batch into parts; all ranks must have equally many parts
        passes = max((each.backward_passes_per_step for each in self._distributed()), default=1)
        for sampler in self._handlers.of(SamplerStateHandler).values():
            sampler.value.split_batches(passes)

    def check(self) -> None:
        if not self._observes_parameters:
            return
        kept = [handler.value for handler in self._handlers.of(OptimizerStateHandler).values()]
        for optimizer in list(stepped):
            if not any(optimizer is each or optimizer._inner is each for each in kept):
                raise UsageError(
                    f"a DistributedOptimizer ({type(optimizer).__name__}) trains in the loop and is not in its state, "
                    "so other workers would not know what it has learnt: give it to the state, as in "
                    "TorchState(model, optimizer)"
                )
        if all(isinstance(each, DistributedOptimizerMixin) for each in kept):
            return
        group = process.group()
        if group is None or group is self._compared_in():
            return
        begun = torch.tensor([-int(self._begun)], device="cpu")
        group.wait(group.allreduce(begun, Max.gloo))
        if begun.item():  # on all members alike
            self._compared_in = weakref.ref(group)
            models = self._handlers.of(ModelStateHandler)
            check_equal(
                group,
                {f"{of}.{name}": param for of, each in models.items() for name, param in each.value.named_parameters()},
                "Pass the optimizer through hvd.DistributedOptimizer, or average the gradients or the parameters by "
                "hand before each commit or check",
            )

    def passes_begun(self) -> int:
        optimizers = self._distributed()
        unused, self._unused = self._unused, sum(each._reducer.unused for each in optimizers)
        if unused != self._unused:
            self.refused = 0
        return max((each.backward_passes_per_step for each in optimizers if each._reducer.is_in_step), default=0)

    def mark(self) -> None:
        self._begun = False
        stepped.clear()
        self._written = self._changes()
        for name, handler in self._handlers.of(ModelStateHandler).items():
            self._buffers.setdefault(name, BufferCopies()).save(handler.modules())

    def undo(self, plain: dict[str, Any]) -> str:
        abandon_steps()  # also those of optimizers that are not in the state
        for handler in self._handlers.of(OptimizerStateHandler).values():
            if not isinstance(handler.value, DistributedOptimizerMixin):
                handler.value.zero_grad(set_to_none=True)
        if changed := super().undo(plain):
            return changed
        if self._begun:
            return "an optimizer has begun a step since the last mark"
        models = self._handlers.of(ModelStateHandler)
        for model in models.values():
            model.modules(anew=True)
        then, now = self._written, self._changes()
        if list(map(id, then[0])) != list(map(id, now[0])):
            return "parameters were replaced since the last mark"
        if then[1] != now[1]:
            return "parameters were written to since the last mark"
        for name in models:
            self._buffers[name].restore()
        return ""

    def _changes(self) -> tuple[list[torch.Tensor], list[int]]:
        if not self._observes_parameters:
            return [], []
        params: list[torch.Tensor] = [
            param for handler in self._handlers.of(ModelStateHandler).values() for param in handler.parameters()
        ]
        return params, [0 if param.is_inference() else param._version for param in params]

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
            before: Any = _ListEntry(optimizer._reducer.before_step, begins)
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

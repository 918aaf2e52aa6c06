"""TorchState: models, optimizers, samplers and plain values that outlive a change of the world.

Three strategies make it of an `ElasticState`: handlers, which copy and send values by type; `TorchLoopWatch`, which
observes how a user's loop changes values around a step; `TorchOptimizerSteps`, which counts steps and undoes one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spark_elastic.elastic.handlers import (
    Handlers,
    HasStateDict,
    Layout,
    StateDictHandler,
    StateHandler,
    TensorSpec,
    copy_all,
)
from spark_elastic.elastic.plain_values import CountingProbe, independent_copy
from spark_elastic.elastic.state import ElasticState
from spark_elastic.elastic.steps import LoopWatch, OptimizerSteps, Recovery, StepCounter
from spark_elastic.errors import HorovodInternalError, UsageError
from spark_elastic.torch.elastic.sampler import ElasticSampler
from spark_elastic.torch.optimizer import DistributedOptimizerMixin

log = logging.getLogger("spark_elastic.torch")


class ModelStateHandler(StateHandler):
    """The handler of a module. Its tensors are parameters and buffers, its light part the extra state of modules."""

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

        This is called after each step, so the list of modules is updated at commits only.
        """
        if self._modules is None:
            self._modules = list(self.value.modules())
        return [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]


class OptimizerStateHandler(StateHandler):
    """The handler of an optimizer. Its tensors are those of its state; options and other state are its light part."""

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


_FOLLOWED = ModelStateHandler, OptimizerStateHandler, SamplerStateHandler, StateDictHandler
"""Handlers whose values change in known ways; the light parts of other handlers are observed like plain values."""


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
        super().__init__(
            handler_for, TorchLoopWatch, TorchOptimizerSteps, {"model": model, "optimizer": optimizer, **kwargs}
        )


class TorchLoopWatch(LoopWatch):
    """Observes a user's loop by the steps of its optimizers and by torch's counters of in-place changes."""

    def __init__(self, handlers: Handlers, counter: StepCounter) -> None:
        super().__init__(handlers, counter)
        self._probe = CountingProbe()
        self._versions_at_resume_point: list[int] = []
        self._versions_at_call: list[int] | None = None
        """The counters of in-place changes when the function was called; None once its first step has come."""
        self._acts_before_step = False
        """True if the loop changes parameters between the call of its function and its first step."""
        self._first_to_step: str | None = None

    def begin(self) -> None:
        self._versions_at_call = self._parameter_versions()
        self._first_to_step = None
        self._probe.begin()
        light = {name: self._handlers.by_name[name].light() for name in self._with_light_part()}
        self.log.begin({**self._handlers.plain.copies(), **light})

    def entering(self, optimizer: str) -> None:
        if not self._counter.in_loop:
            return
        if self._versions_at_call is not None:
            self._acts_before_step |= self._versions_at_call != self._parameter_versions()
            self._versions_at_call = None
            for handler in self._handlers.of(SamplerStateHandler).values():
                handler.value.learn_records_before_step()
        if self._first_to_step is None:
            self._first_to_step = optimizer
            self._probe.start(self._counts())
        elif optimizer == self._first_to_step and not self._probe.settled:
            self._probe.compare(self._counts())
            self._probe.settle()
        self.log.entering(self.value_of)

    def resume_point(self, committed: bool) -> None:
        if not committed:
            self._versions_at_resume_point = self._parameter_versions()

    def altered(self, stepped: bool) -> bool:
        if self._has_unknown_tensors():
            return True
        return self._acts_before_step if stepped else self._versions_at_resume_point != self._parameter_versions()

    def amid(self, error: HorovodInternalError) -> bool:
        distributed = distributed_optimizers(self._handlers)
        first = distributed.get(self._first_to_step or "")
        reducer = error.reducer
        if len(distributed) > 1 and first is not None and reducer is not None and reducer is not first._reducer:
            return True
        if not self._probe.settled:
            self._probe.compare(self._counts())
        return self._probe.several_steps

    def value_of(self, name: str) -> Any:
        handler = self._handlers.by_name.get(name)
        return super().value_of(name) if handler is None else handler.light()

    def restore_values(self, values: Mapping[str, Any]) -> None:
        handled = self._handlers.by_name
        for name in values.keys() & handled.keys():
            handled[name].set_light(values[name])
        super().restore_values({name: value for name, value in values.items() if name not in handled})

    def _counts(self) -> dict[str, Any]:
        """Return copies of all values by which the loop may count its steps."""
        names = [*self._with_light_part(), *self._handlers.of(SamplerStateHandler)]
        return {**self._handlers.plain.copies(), **{name: self._handlers.by_name[name].light() for name in names}}

    def _with_light_part(self) -> list[str]:
        """Return the names of handled values whose light parts are observed like plain values."""
        own_sync = self._handlers.with_own_sync
        return [
            name
            for name, handler in self._handlers.by_name.items()
            if isinstance(handler, StateDictHandler) or not (isinstance(handler, _FOLLOWED) or name in own_sync)
        ]

    def _has_unknown_tensors(self) -> bool:
        """Return True if users' own handlers keep values that only their `save` and `restore` can copy."""
        own_sync = self._handlers.with_own_sync
        return any(
            not isinstance(handler, _FOLLOWED) and (name in own_sync or bool(handler.layout()))
            for name, handler in self._handlers.by_name.items()
        )

    def _parameter_versions(self) -> list[int]:
        """Return torch's counter of in-place changes of each parameter."""
        return [number for handler in self._handlers.of(ModelStateHandler).values() for number in handler.versions()]


class TorchOptimizerSteps(OptimizerSteps):
    """Counts steps by hooks of torch's optimizers, and undoes what an unfinished step has done to buffers and samplers.

    The hooks refer to this object weakly, because an optimizer may outlive its state.
    """

    def __init__(self, handlers: Handlers, counter: StepCounter, watch: LoopWatch) -> None:
        super().__init__(handlers, counter, watch)
        self._hooks: dict[str, list[Any]] = {}
        self._buffers: dict[str, list[torch.Tensor]] = {}
        """Copies of each model's buffers after the last step or at the last resume point."""
        self._refused = 0
        """The number of commits and checks in a row that came in the middle of a step."""

    def attach(self, name: str) -> None:
        handler = self._handlers.by_name[name]
        if isinstance(handler, OptimizerStateHandler):
            self._hook(name, handler.value)
        # with several passes a loop divides each batch into parts; all ranks must have equally many parts
        passes = max((each.backward_passes_per_step for each in self._distributed()), default=1)
        for sampler in self._samplers():
            sampler.split_batches(passes)

    def may_mark(self) -> bool:
        """Return False between `backward` and the optimizer's step, and between the passes of one step.

        At a resume point there, batches would count as done whose gradients are lost by a failure.
        """
        passes = [each.backward_passes_per_step for each in self._distributed() if each._reducer.accumulating]
        self._refused = self._refused + 1 if passes else 0
        if passes and self._refused > 2 * max(passes):
            raise UsageError(
                f"the last {self._refused} calls of state.commit() or state.check_host_updates() came between "
                "loss.backward() and optimizer.step(), where a training cannot be resumed; call them after "
                "optimizer.step()"
            )
        return not passes

    def may_leave(self) -> bool:
        return not any(each._reducer.accumulating for each in self._distributed())

    def resume_point(self, called: bool) -> None:
        for sampler in self._samplers():
            sampler.start_counting()
        self._copy_buffers()

    def undo_step(self, choice: Recovery) -> None:
        if choice is not Recovery.COMMIT:
            models = self._handlers.of(ModelStateHandler)
            for name, copies in self._buffers.items():
                copy_all(models[name].buffers(), copies)
        if choice is Recovery.LIVE:
            for sampler in self._samplers():
                sampler.drop_records_of_step()

    def drop_unfinished(self) -> None:
        for handler in self._handlers.of(OptimizerStateHandler).values():
            if isinstance(handler.value, DistributedOptimizerMixin):
                handler.value._reducer.abandon()
            else:
                handler.value.zero_grad(set_to_none=True)

    def _hook(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        for hook in self._hooks.pop(name, ()):
            hook.remove()
        self._counter.steps[name] = 0
        owner = weakref.ref(self)

        def stepped(*_: Any) -> None:
            steps = owner()
            if steps is not None:
                steps._stepped(name)

        def entering(*_: Any) -> None:
            steps = owner()
            if steps is not None:
                steps._watch.entering(name)

        if isinstance(optimizer, DistributedOptimizerMixin):  # before what a loop does between reduction and step
            before: Any = _ListEntry(optimizer._reducer.on_reduced, entering)
        else:
            before = optimizer.register_step_pre_hook(entering)
        self._hooks[name] = [before, optimizer.register_step_post_hook(stepped)]

    def _stepped(self, optimizer: str) -> None:
        self._counter.stepped(optimizer)
        self._watch.log.stepped()
        for sampler in self._samplers():
            sampler.step_applied()
        if self._buffers:
            self._copy_buffers()

    def _copy_buffers(self) -> None:
        for name, handler in self._handlers.of(ModelStateHandler).items():
            buffers = handler.buffers()
            if not buffers:
                self._buffers.pop(name, None)
                continue
            copies = self._buffers.get(name)
            if copies is None or [c.shape for c in copies] != [b.shape for b in buffers]:
                self._buffers[name] = [buffer.detach().clone() for buffer in buffers]
            else:
                copy_all(copies, buffers)

    def _distributed(self) -> list[Any]:
        return list(distributed_optimizers(self._handlers).values())

    def _samplers(self) -> list[ElasticSampler]:
        return [handler.value for handler in self._handlers.of(SamplerStateHandler).values()]


def distributed_optimizers(handlers: Handlers) -> dict[str, Any]:
    """Return the `DistributedOptimizer`s among the values of a state, by name."""
    values = {name: handler.value for name, handler in handlers.by_name.items()}
    return {name: value for name, value in values.items() if isinstance(value, DistributedOptimizerMixin)}


class _ListEntry:
    """Adds a function to a list; `remove` removes it, as it does for the handles of torch's hooks."""

    def __init__(self, functions: list[Callable[[], None]], function: Callable[[], None]) -> None:
        self._functions, self._function = functions, function
        functions.append(function)

    def remove(self) -> None:
        self._functions.remove(self._function)

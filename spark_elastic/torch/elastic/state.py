"""TorchState: models, optimizers, samplers and plain values that outlive a change of the world."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from spark_elastic.elastic.handled_state import HandledState
from spark_elastic.elastic.handled_values import StateHandler, copy_all
from spark_elastic.elastic.plain_values import same
from spark_elastic.elastic.recovery import Recovery
from spark_elastic.errors import HorovodInternalError, UsageError
from spark_elastic.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateDictHandler,
    handler_for,
)
from spark_elastic.torch.elastic.sampler import ElasticSampler
from spark_elastic.torch.optimizer import DistributedOptimizerMixin

_FOLLOWED = ModelStateHandler, OptimizerStateHandler, SamplerStateHandler, StateDictHandler
"""How values change that these handlers keep is known; of others the light part is followed."""


class TorchState(HandledState):
    """Models, optimizers, samplers, schedulers and plain values, each a keyword argument and then an attribute.

    How a value is kept is decided by its type, see `handlers`; what has no handler is a plain Python value, which must
    be picklable.

    Args:
        model: a module, or None.
        optimizer: a torch optimizer or `DistributedOptimizer`, or None.
        kwargs: more of the same, and anything else to keep.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._counted: dict[str, Any] = {}
        self._buffer_copies: dict[str, list[torch.Tensor]] = {}
        self._put_off = 0
        self._at_mark: list[int] = []
        self._at_call: list[int] | None = None
        self._acts_before_step = False
        self._first_to_step: str | None = None
        self._at_first_step: Any = None
        self._counts_rarely = False
        super().__init__(model=model, optimizer=optimizer, **kwargs)
        for name in self._handlers:
            self._replaced(name)
        self.save()

    def _handler_for(self, value: Any) -> StateHandler | None:
        return handler_for(value)

    def _replaced(self, name: str) -> None:
        if isinstance(self._handlers[name], OptimizerStateHandler):
            self._count_steps_of(name, self._handlers[name].value)
        self._tell_samplers()

    # --- what the loop calls --------------------------------------------------------------------

    def _mark_resume_point(self, committed: bool = False, called: bool = False) -> None:
        if not self._only_optimizers_act and not committed:
            self._at_mark = self._parameter_versions()
        super()._mark_resume_point(committed, called)

    def _call_begins(self) -> None:
        if not self._only_optimizers_act:
            self._at_call = self._parameter_versions()
            self._first_to_step = None
            self._at_first_step = None
            light = {name: self._handlers[name].light() for name in self._stateful()}
            self._follow.begin({**self._plain_values(), **light})

    def _enters_step(self, optimizer: str) -> None:
        if self._only_optimizers_act or not self._in_loop:
            return
        if self._at_call is not None:
            self._acts_before_step |= self._at_call != self._parameter_versions()
            self._at_call = None
            for sampler in self._samplers():
                sampler.learn_records_before_step()
        if self._first_to_step is None:
            self._first_to_step = optimizer
            self._at_first_step = self._counts()
        elif optimizer == self._first_to_step and self._at_first_step is not None:
            self._counts_rarely |= self._has_not_counted()
            self._at_first_step = None
        self._follow.entering(self._value_of)

    def _counts(self) -> dict[str, Any]:
        """Return what tells the loop how far it has come."""
        samplers = [name for name, handler in self._handlers.items() if isinstance(handler, SamplerStateHandler)]
        light = {name: self._handlers[name].light() for name in [*self._stateful(), *samplers]}
        return {**self._plain_values(), **light}

    def _has_not_counted(self) -> bool:
        return bool(self._at_first_step) and same(self._at_first_step, self._counts())

    def _amid(self, error: HorovodInternalError) -> bool:
        if self._only_optimizers_act:
            return False
        failed = error.reducer
        distributed = self._distributed()
        first = distributed.get(self._first_to_step or "")
        if len(distributed) > 1 and first is not None and failed is not None and failed is not first._reducer:
            return True
        return self._counts_rarely or self._has_not_counted()

    def _samplers(self) -> list[ElasticSampler]:
        return [handler.value for handler in self._handlers.values() if isinstance(handler, SamplerStateHandler)]

    def _altered(self, stepped: bool) -> bool:
        if self._only_optimizers_act:
            return False
        if self._has_what_is_not_followed():
            return True
        return self._acts_before_step if stepped else self._at_mark != self._parameter_versions()

    def _has_what_is_not_followed(self) -> bool:
        """Whether users' own handlers keep something that only their `save` and `restore` know of."""
        own_style = self._own_style()
        return any(
            not isinstance(handler, _FOLLOWED) and (name in own_style or bool(handler.layout()))
            for name, handler in self._handlers.items()
        )

    def _parameter_versions(self) -> list[int]:
        """Return numbers that grow when something changes a parameter in place."""
        modules = [handler for handler in self._handlers.values() if isinstance(handler, ModelStateHandler)]
        return [number for handler in modules for number in handler.versions()]

    def _stateful(self) -> list[str]:
        own_style = self._own_style()
        return [
            name
            for name, handler in self._handlers.items()
            if isinstance(handler, StateDictHandler) or not (isinstance(handler, _FOLLOWED) or name in own_style)
        ]

    def _value_of(self, name: str) -> Any:
        handler = self._handlers.get(name)
        return getattr(self, name) if handler is None else handler.light()

    def _put_back(self, values: dict[str, Any]) -> None:
        for name in values.keys() & self._handlers.keys():
            self._handlers[name].set_light(values[name])
        super()._put_back({name: value for name, value in values.items() if name not in self._handlers})

    def _start_counting(self) -> None:
        super()._start_counting()
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.start_counting()
        self._save_buffers()

    def _may_mark(self) -> bool:
        """Not between `backward` and the optimizer's step, nor between the passes of one step: the batches would count
        as done, and their gradients would be lost."""
        if not super()._may_mark():
            return False
        passes = [o.backward_passes_per_step for o in self._distributed().values() if o._reducer.accumulating]
        self._put_off = self._put_off + 1 if passes else 0
        if passes and self._put_off > 2 * max(passes):
            raise UsageError(
                f"the last {self._put_off} calls of state.commit() or state.check_host_updates() came between "
                "loss.backward() and optimizer.step(), where a training cannot be resumed; call them after "
                "optimizer.step()"
            )
        return not passes

    def _may_leave(self) -> bool:
        return not any(o._reducer.accumulating for o in self._distributed().values())

    def _interrupted(self) -> None:
        self._drop_gradients()

    def _settle(self, choice: Recovery) -> None:
        if choice is not Recovery.COMMIT:
            for name, copies in self._buffer_copies.items():
                copy_all(self._handlers[name].buffers(), copies)  # type: ignore[attr-defined]
        if choice is Recovery.LIVE:
            for sampler in self._samplers():
                sampler.drop_records_of_step()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """A loop that zeroes gradients at the end of an iteration must not add to those of the step before."""
        for handler in self._handlers.values():
            if isinstance(handler, OptimizerStateHandler):
                _drop_gradients(handler.value)

    # --- steps ----------------------------------------------------------------------------------

    def _distributed(self) -> dict[str, Any]:
        return {n: h.value for n, h in self._handlers.items() if isinstance(h.value, DistributedOptimizerMixin)}

    def _tell_samplers(self) -> None:
        """Gradients are summed over several passes where loops cut batches in parts; ranks must have as many parts."""
        passes = max((o.backward_passes_per_step for o in self._distributed().values()), default=1)
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.split_batches(passes)

    def _count_steps_of(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        for hook in self._counted.pop(name, ()):
            hook.remove()
        self._steps[name] = 0
        owner = weakref.ref(self)

        def stepped(*_: Any) -> None:
            state = owner()
            if state is not None:
                state._stepped(name)

        def entering(*_: Any) -> None:
            state = owner()
            if state is not None:
                state._enters_step(name)

        if isinstance(optimizer, DistributedOptimizerMixin):  # before what a loop does between reduction and step
            before: Any = _Watch(optimizer._reducer.on_reduced, entering)
        else:
            before = optimizer.register_step_pre_hook(entering)
        self._counted[name] = [before, optimizer.register_step_post_hook(stepped)]

    def _stepped(self, optimizer: str) -> None:
        super()._stepped(optimizer)
        self._follow.stepped()
        for sampler in self._samplers():
            sampler.step_applied()
        if self._buffer_copies:
            self._save_buffers()

    def _save_buffers(self) -> None:
        for name, handler in self._handlers.items():
            if not isinstance(handler, ModelStateHandler):
                continue
            buffers = handler.buffers()
            if not buffers:
                self._buffer_copies.pop(name, None)
                continue
            copies = self._buffer_copies.get(name)
            if copies is None or [c.shape for c in copies] != [b.shape for b in buffers]:
                self._buffer_copies[name] = [buffer.detach().clone() for buffer in buffers]
            else:
                copy_all(copies, buffers)


class _Watch:
    """A function in a list of those to call, until it is removed."""

    def __init__(self, watchers: list[Callable[[], None]], watcher: Callable[[], None]) -> None:
        self._watchers, self._watcher = watchers, watcher
        watchers.append(watcher)

    def remove(self) -> None:
        self._watchers.remove(self._watcher)


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, DistributedOptimizerMixin):
        optimizer._reducer.abandon()
    else:
        optimizer.zero_grad(set_to_none=True)

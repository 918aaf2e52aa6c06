"""TorchState: models, optimizers, samplers and plain values that outlive a change of the world."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from spark_elastic.collective.handled_state import HandledState
from spark_elastic.collective.handled_values import StateHandler, copy_all
from spark_elastic.core.recovery import Recovery
from spark_elastic.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    handler_for,
)
from spark_elastic.torch.optimizer import DistributedOptimizerMixin


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

    def _start_counting(self) -> None:
        super()._start_counting()
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.start_counting()
        self._save_buffers()

    def _may_leave(self) -> bool:
        """Not between the backward passes of one step, whose gradients would be lost; unless the loop only ever checks
        there: then the passes since the last step are given up."""
        passes = [o.backward_passes_per_step for o in self._distributed().values() if o._reducer.accumulating]
        self._put_off = self._put_off + 1 if passes else 0
        return not passes or self._put_off > 2 * max(passes)

    def _interrupted(self) -> None:
        self._drop_gradients()

    def _settle(self, choice: Recovery) -> None:
        if choice is not Recovery.COMMIT:
            for name, copies in self._buffer_copies.items():
                copy_all(self._handlers[name].buffers(), copies)  # type: ignore[attr-defined]
        if choice is Recovery.LIVE:
            steps = max(self._steps.values())
            passes = max((o.backward_passes_per_step for o in self._distributed().values()), default=1)
            for handler in self._handlers.values():
                if isinstance(handler, SamplerStateHandler):
                    handler.value.drop_records_beyond(steps, passes)
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

        def finish_save(*_: Any) -> None:
            state = owner()
            if state is not None:
                state._finish_save()

        self._counted[name] = [
            optimizer.register_step_pre_hook(finish_save),
            optimizer.register_step_post_hook(stepped),
        ]
        if isinstance(optimizer, DistributedOptimizerMixin):
            optimizer._reducer.while_waiting = finish_save

    def _stepped(self, optimizer: str) -> None:
        super()._stepped(optimizer)
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


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, DistributedOptimizerMixin):
        optimizer._reducer.abandon()
    else:
        optimizer.zero_grad(set_to_none=True)

"""TorchState: models, optimizers, samplers and plain values that outlive a change of the world."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from spark_elastic import state as base
from spark_elastic.core.recovery import Recovery
from spark_elastic.torch.elastic.frontend import frontend
from spark_elastic.torch.elastic.handlers import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    copy_all,
    handler_for,
    take_over,
)
from spark_elastic.torch.optimizer import DistributedOptimizerMixin


class State(base.State):
    """A state of your own: define `save`, `restore` and `sync`."""

    _frontend = frontend


class ObjectState(base.ObjectState):
    """Plain Python values, each a keyword argument and then an attribute."""

    _frontend = frontend


class TorchState(base.SteppingState):
    """Models, optimizers, samplers, schedulers and plain values, each a keyword argument and then an attribute.

    How a value is kept is decided by its type, see `handlers`; what has no handler is a plain Python value, which must
    be picklable.

    Args:
        model: a module, or None.
        optimizer: a torch optimizer or `DistributedOptimizer`, or None.
        kwargs: more of the same, and anything else to keep.
    """

    _frontend = frontend

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        self._handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in values.items():
            handler = handler_for(value)
            if handler is None:
                plain[name] = value
            else:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        self._counted: dict[str, Any] = {}
        self._buffer_copies: dict[str, list[torch.Tensor]] = {}
        self._saved_progress: int | None = None
        self._unfinished = False
        self._put_off = 0
        super().__init__(**plain)
        for name, handler in self._handlers.items():
            if isinstance(handler, OptimizerStateHandler):
                self._count_steps_of(name, handler.value)
        self._tell_samplers()
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None and value is not handler.value:
            handler.set_value(value)
            if isinstance(handler, OptimizerStateHandler):
                self._count_steps_of(name, value)
            self._tell_samplers()
        super().__setattr__(name, value)

    # --- what users call ------------------------------------------------------------------------

    def save(self) -> None:
        self._begin_save()
        self._finish_save()

    def commit(self) -> None:
        """Make the present state the one that `restore` returns to, then check for updated hosts.

        Inside the elastic loop the parameters are copied a little later: while the next gradients are on their way
        and this process would only wait, which is before anything changes them.

        Raises: HostsUpdatedInterrupt: the world is about to change; on every member at the same commit.
        """
        if not self._in_loop or type(self).save is not TorchState.save:
            super().commit()
            return
        self._begin_save()
        self._committed()
        self._resume_values = {name: h._light for name, h in self._handlers.items()}, self._saved_values
        self._start_counting()
        self._check_host_updates()

    def _begin_save(self) -> None:
        for handler in self._handlers.values():
            handler.begin_save() if type(handler).save is StateHandler.save else handler.save()
        super().save()
        self._saved_progress = self._progress
        self._unfinished = True

    def _finish_save(self) -> None:
        if self._unfinished:
            self._unfinished = False
            for handler in self._handlers.values():
                handler.finish_save()

    def restore(self) -> None:
        self._finish_save()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        if self._saved_progress is not None:
            self._set_progress(self._saved_progress)

    def sync(self) -> None:
        """Take over the state of the most advanced member."""
        staged = self._progress is not None
        handlers = {name: h for name, h in self._handlers.items() if name not in self._own_style()}
        values = take_over(handlers, self._root, self._plain_values(), staged)
        for name in self._own_style():
            self._handlers[name].sync()
        self._put_plain_values(values)

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    # --- what the loop calls --------------------------------------------------------------------

    def _sync_from(self, root: int, progress: int | None) -> None:
        super()._sync_from(root, progress)
        self.save()

    def _own_style(self) -> list[str]:
        """Handlers that bring a `sync` of their own, as Horovod's do."""
        return [name for name, handler in self._handlers.items() if type(handler).sync is not StateHandler.sync]

    def _light_values(self) -> Any:
        return {name: handler.light() for name, handler in self._handlers.items()}, self._plain_values()

    def _put_light_values(self, values: Any) -> None:
        light, plain = values
        for name, part in light.items():
            self._handlers[name].set_light(part)
        self._put_plain_values(plain)

    def _left_loop(self) -> None:
        self._finish_save()

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

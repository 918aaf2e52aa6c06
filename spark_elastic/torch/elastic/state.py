"""TorchState: models, optimizers, samplers and plain values that outlive a change of the world.

Two strategies make it of an `ElasticState`: handlers, which copy and send values by type, and `TorchOptimizerSteps`,
which observes what has changed since the last mark.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from spark_elastic.elastic.handlers import Handlers, HasStateDict, StateDictHandler, StateHandler
from spark_elastic.elastic.mark import OptimizerSteps, StepCounter
from spark_elastic.elastic.state import ElasticState
from spark_elastic.errors import UsageError
from spark_elastic.torch.elastic.handlers import (
    BufferCopies,
    ModelStateHandler,
    OptimizerStateHandler,
    ParameterHandler,
    SamplerStateHandler,
)
from spark_elastic.torch.elastic.sampler import ElasticSampler
from spark_elastic.torch.optimizer import DistributedOptimizerMixin, stepped
from spark_elastic.torch.parameters import abandon_steps


def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note that an optimizer of this process, of a state or not, has made a step."""
    stepped.add(optimizer)


register_optimizer_step_post_hook(note_step)


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
    if isinstance(value, torch.nn.Parameter) or (
        isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
    ):
        return ParameterHandler(value)
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

    The hooks refer to this object weakly, because an optimizer may outlive its state. `observes_parameters` is False
    for loops, such as the estimators', which can repeat all that they write besides their optimizer's steps, if the
    parameters `moved` are copied at each mark.
    """

    def __init__(
        self,
        handlers: Handlers,
        counter: StepCounter,
        observes_parameters: bool = True,
        moved: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(handlers, counter)
        self._observes_parameters, self._moved = observes_parameters, moved
        self._hooks: dict[str, list[Any]] = {}
        self._begun = False
        """An optimizer has begun a step since the mark: a `DistributedOptimizer` when it has all reduced gradients."""
        self._written: tuple[list[torch.Tensor], list[int]] = [], []
        """The parameters, and their counters of in-place changes, at the mark."""
        self._unused = 0
        self._covered = False
        """All tensors that the optimizers train are known to belong to values of the state."""
        self._buffers: dict[str, BufferCopies] = {}
        """Copies of each model's buffers at the mark."""

    def attach(self, name: str) -> None:
        self._covered = False
        handler = self._handlers.by_name[name]
        if isinstance(handler, OptimizerStateHandler):
            self._hook(name, handler.value)
        # with several passes a loop divides each batch into parts; all ranks must have equally many parts
        passes = max((each.backward_passes_per_step for each in self._distributed()), default=1)
        for sampler in self._handlers.of_type(SamplerStateHandler).values():
            sampler.value.split_batches(passes)

    def check(self) -> None:
        if not self._observes_parameters:
            return
        optimizers = self._handlers.of_type(OptimizerStateHandler)
        kept = {id(each) for each in self._optimizers()}
        wrapped = [each for each in list(stepped) if isinstance(each, DistributedOptimizerMixin)]
        kept |= {id(each) for each in wrapped if id(each._inner) in kept}
        outsiders = [each for each in list(stepped) if id(each) not in kept]
        known = set(map(id, self._parameters().values())) if outsiders or not self._covered else set()
        for optimizer in outsiders:
            is_distributed = isinstance(optimizer, DistributedOptimizerMixin)
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if is_distributed or any(id(param) in known for param in params):
                self.refuse_outsider(
                    optimizer, "a DistributedOptimizer" if is_distributed else "an optimizer of the state's parameters"
                )
        for name, handler in optimizers.items() if not self._covered else ():
            for param in handler.params():
                if id(param) not in known:
                    raise UsageError(
                        f"{name} of the state trains a tensor of shape {tuple(param.shape)} that belongs to no value "
                        "of the state, so a newcomer would not have it: give its model, or the parameter itself, to "
                        "the state as a keyword argument"
                    )
        self._covered = True
        if all(isinstance(handler.value, DistributedOptimizerMixin) for handler in optimizers.values()):
            return
        self.compare_models(
            self._begun,
            self._parameters,
            "Pass the optimizer through hvd.DistributedOptimizer, or average the gradients or the parameters by hand "
            "before each commit or check",
        )

    def _parameters(self) -> dict[str, torch.Tensor]:
        models = self._handlers.of_type(ModelStateHandler)
        named = {f"{key}.{name}": p for key, each in models.items() for name, p in each.value.named_parameters()}
        return named | {name: each.value for name, each in self._handlers.of_type(ParameterHandler).items()}

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
        for name, handler in self._handlers.of_type(ModelStateHandler).items():
            self._buffers.setdefault(name, BufferCopies(self._moved)).save(handler.modules())

    def undo(self, plain: dict[str, Any]) -> str:
        abandon_steps()  # also those of optimizers that are not in the state
        for handler in self._handlers.of_type(OptimizerStateHandler).values():
            if not isinstance(handler.value, DistributedOptimizerMixin):
                for param in handler.params():  # a `zero_grad` of its own may want other arguments
                    param.grad = None
        if changed := super().undo(plain):
            return changed
        if self._begun:
            return "an optimizer has begun a step since the last mark"
        models = self._handlers.of_type(ModelStateHandler)
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
            param for handler in self._handlers.of_type(ModelStateHandler).values() for param in handler.parameters()
        ]
        params += [handler.value for handler in self._handlers.of_type(ParameterHandler).values()]
        return params, [0 if param.is_inference() else param._version for param in params]

    def _hook(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        for hook in self._hooks.pop(name, ()):
            hook.remove()
        if "_optimizer_step_post_hooks" not in vars(optimizer):
            raise UsageError(
                f"{name} of the state is a {type(optimizer).__name__} that has not called the __init__ of "
                "torch.optim.Optimizer, so its steps cannot be counted; call super().__init__(params, defaults) in it"
            )
        self._counter.steps[name] = 0
        owner = weakref.ref(self)

        def begins(*_: Any) -> None:
            if (steps := owner()) is not None:
                steps._begun = True

        def stepped(*_: Any) -> None:
            if (steps := owner()) is not None:
                steps._counter.stepped(name)

        if isinstance(optimizer, DistributedOptimizerMixin):  # a closure is called, and may fail, after its pre-hooks
            functions = optimizer._reducer.before_step
            before: Any = RemovableHandle(functions)
            functions[before.id] = begins
        else:
            before = optimizer.register_step_pre_hook(begins)
        self._hooks[name] = [before, optimizer.register_step_post_hook(stepped)]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        handlers = self._handlers.of_type(OptimizerStateHandler).values()
        return [optimizer for handler in handlers for optimizer in handler.optimizers()]

    def _distributed(self) -> list[Any]:
        return [optimizer for optimizer in self._optimizers() if isinstance(optimizer, DistributedOptimizerMixin)]

"""DistributedOptimizer: a Keras optimizer that averages gradients over the world before each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import keras

from spark_elastic.collective.operators import Average, Compression, ReduceOp
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.elastic.call_stack import calling_object, is_called_by
from spark_elastic.errors import UsageError
from spark_elastic.keras.backend import BACKEND, has_value, native, outside_of_graphs

distributed: WeakSet[Any] = WeakSet()
"""All optimizers of this process that reduce gradients."""
_ABOVE = 14
"""Calls to look at above the access to an attribute: Keras and TensorFlow put their tracking in between."""


class ReducingOptimizer:
    """The methods that `DistributedOptimizer` adds to an optimizer's class, as the first base class of the result."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The plain optimizer's class, whose name Keras saves, so that the file can be loaded without this package."""
        return type(self).__mro__[2]

    _wrap: Callable[[Any], Any]
    """A function that makes a plain optimizer distributed, with the same arguments."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **more: Any) -> Any:
        """Create an optimizer of this configuration and distribute it with the same arguments."""
        plain = cls.__mro__[2]
        return cls._wrap(plain.from_config(config, **more))  # type: ignore[attr-defined]

    @property
    def _steps(self) -> Any:
        """The object that reduces gradients; None if a `LossScaleOptimizer` around this one reduces them."""
        return self.__dict__.get("_distributed_steps")

    @property
    def backward_passes_per_step(self) -> int:
        """The number of calls whose gradients are accumulated before they are reduced."""
        return 1 if self._steps is None else int(self._steps.passes)

    def steps_applied(self) -> Any:
        """Return the number of steps reduced here, also of those that loss scaling skipped; in a graph, a tensor."""
        return self._steps.applied()

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)  # type: ignore[misc]
        if self._steps is not None:
            self._steps.build(variables)

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable's gradient from the reduction; call it before the first step."""
        self.__dict__.setdefault("_local_variables", []).append(native(var))

    def _local_indices(self, variables: Sequence[Any]) -> list[int]:
        local = {id(variable) for variable in self.__dict__.get("_local_variables", ())}
        return [at for at, variable in enumerate(variables) if id(native(variable)) in local] if local else []

    def compute_gradients(self, loss: Any, var_list: Sequence[Any], tape: Any = None) -> list[tuple[Any, Any]]:
        """Return pairs of (reduced gradient, variable), for `apply_gradients`, which does not reduce them again.

        With `backward_passes_per_step` > 1 the gradients are not reduced here: `apply_gradients` accumulates them.
        `loss` is a tensor recorded by the `tf.GradientTape`, or without one a function without arguments. Raises
        HorovodInternalError if a peer is gone.
        """
        import tensorflow as tf

        if tape is None:
            with tf.GradientTape() as tape:
                loss = loss()
        variables = list(var_list)
        grads = tape.gradient(loss, [native(variable) for variable in variables])
        if self._steps is not None and self.backward_passes_per_step == 1:
            grads = self._steps.reduced(grads, variables, self._local_indices(variables))
            self.__dict__["_reduced_already"] = grads
        return list(zip(grads, variables, strict=True))

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        return self.compute_gradients(loss, var_list, tape)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients, then update the variables with them.

        Raises:
            HorovodInternalError: a peer is gone; no variable was changed. From a `tf.function` TensorFlow raises an
                error of its own class instead, which `elastic.run` recognises.
        """
        grads = list(grads)
        plain = super().apply  # type: ignore[misc]
        variables = None if trainable_variables is None else list(trainable_variables)
        if self._steps is None or not grads:
            plain(grads, variables)
            return
        own: Any = self
        if variables is not None and not own.built:
            build_for(own, variables)
        already = self.__dict__.pop("_reduced_already", ())
        if len(already) == len(grads) and all(one is other for one, other in zip(already, grads, strict=True)):
            self._steps.applies(lambda reduced: plain(reduced, variables), grads)
            return
        trained = own._trainable_variables if variables is None else variables
        local = own._local_indices(trained)
        numbers = list(range(len(grads)))
        if variables is not None and self._steps.passes > 1:
            own._check_variables_are_known(variables)
            numbers = [own._get_variable_index(variable) for variable in variables]
        self._steps.step(grads, numbers, lambda reduced: plain(reduced, variables), trained, local)

    # A LossScaleOptimizer around this one (`compile` adds it under mixed_float16) clears `loss_scale_factor` of its
    # inner optimizer, and skips steps whose gradients are not finite. It must check gradients after the reduction:
    # otherwise one member skips a step while the others wait for it. So the setter moves the reduction outwards to it.

    @property
    def loss_scale_factor(self) -> Any:
        # TensorFlow's tracking reads the old value first, and does not call the setter for an equal one
        if is_called_by("__setattr__"):
            self._yield_to_loss_scaling()
        return self.__dict__.get("loss_scale_factor")

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        self.__dict__["loss_scale_factor"] = value
        self._yield_to_loss_scaling()

    def _yield_to_loss_scaling(self) -> None:
        """Move the reduction to the `LossScaleOptimizer` around this one, if its `__init__` is running now."""
        if self._steps is None:
            return
        kind = keras.optimizers.LossScaleOptimizer
        around = calling_object(lambda caller: isinstance(caller, kind), within=_ABOVE, method="__init__")
        if around is not None and around.inner_optimizer is self:
            if not isinstance(around, ReducingOptimizer):
                _become_distributed(around, self._steps)
            self.__dict__["_distributed_steps"] = None


def _distributed_class(kind: type, wrap: Callable[[Any], Any]) -> type:
    names = {"__module__": kind.__module__, "_wrap": staticmethod(wrap)}
    return type(kind.__name__, (ReducingOptimizer, kind), names)


def _become_distributed(optimizer: Any, steps: Any) -> None:
    optimizer.__dict__["_distributed_steps"] = steps
    kind = type(optimizer)
    object.__setattr__(optimizer, "__class__", _distributed_class(kind, DistributedOptimizer))
    distributed.add(optimizer)
    if optimizer.built:
        steps.build(optimizer._trainable_variables)


def build_for(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build an optimizer before its first step, with its variables initialised even where a function is traced."""
    made_in_this_trace = not all(map(has_value, variables))
    with nullcontext() if made_in_this_trace else outside_of_graphs(), keras.name_scope(optimizer.name):
        optimizer.build(variables)
    optimizer.built = True


def reduces(optimizer: Any) -> bool:
    """Return True if this optimizer itself reduces gradients."""
    return isinstance(optimizer, ReducingOptimizer) and optimizer._steps is not None


def is_distributed(optimizer: Any) -> bool:
    """Return True if this optimizer, or its inner optimizer, reduces gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer, ReducingOptimizer) or isinstance(inner, ReducingOptimizer)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that steps with the gradients of all members, for `compile` or a custom loop.

    It is an instance of a subclass of the given optimizer's class and shares its variables. It is saved as the plain
    optimizer, and `load_model` makes it distributed again. Clipping, loss scaling, weight decay, averages of the
    weights and `gradient_accumulation_steps` work on the reduced gradients.

    Args:
        optimizer: a Keras optimizer, built or not; or its name.
        name: the new name of the optimizer; None: it keeps its name.
        device_dense: has no effect; for compatibility with Horovod.
        device_sparse: has no effect.
        compression: the compressor of the sent gradients.
        sparse_as_dense: reduce sparse gradients as dense ones instead of gathering them.
        gradient_predivide_factor: divisor of gradients before the sum; sums are divided by size / factor.
        op: Average or Sum.
        backward_passes_per_step: calls whose gradients are accumulated before they are reduced and applied. The
            optimizer's `iterations` count applied steps.
        average_aggregated_gradients: divide accumulated gradients by `backward_passes_per_step`.
        num_groups: has no effect: message sizes are chosen automatically.
        groups: has no effect.
        process_set: the processes to reduce over.
        scale_local_gradients: divide gradients of variables given to `register_local_var` by the size.

    Raises:
        UsageError: the arguments contradict each other.
    """
    given = {each: value for each, value in locals().items() if each not in ("optimizer", "name")}
    plain = keras.optimizers.get(optimizer)
    if is_distributed(plain):
        raise UsageError("the optimizer is already a DistributedOptimizer; wrap the plain optimizer, once")
    if backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}")
    reduction: dict[str, Any] = {
        "op": op,
        "compression": compression,
        "predivide": gradient_predivide_factor,
        "process_set": process_set,
    }
    if BACKEND == "tensorflow":
        from spark_elastic.keras.tensorflow_backend import TensorFlowSteps
        from spark_elastic.tensorflow.gradients import GradientReducer
        from spark_elastic.tensorflow.operations import size_op

        reducer: Any = GradientReducer(**reduction, sparse_as_dense=sparse_as_dense)
        steps: Any = TensorFlowSteps(reducer, backward_passes_per_step, average_aggregated_gradients)
        size: Callable[[], Any] = partial(size_op, process_set)
    else:
        from spark_elastic.collective.fused import FusedReduction
        from spark_elastic.keras.torch_backend import TorchSteps

        steps = TorchSteps(FusedReduction(**reduction), backward_passes_per_step, average_aggregated_gradients)
        size = process_set.size
    if scale_local_gradients:
        steps.divide_local = size
    wrap = partial(DistributedOptimizer, **given)
    wrapped: Any = _distributed_class(type(plain), wrap)
    instance = object.__new__(wrapped)
    instance.__dict__.update(plain.__dict__)
    instance.__dict__["_distributed_steps"] = steps
    distributed.add(instance)
    if name is not None:
        instance.__dict__["name"] = name
    if instance.built:
        steps.build(instance._trainable_variables)
    return instance


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedOptimizer` that does not reduce the gradients of some layers.

    Each worker trains `local_layers`, one layer or several, by itself. With `scale_local_gradients` their gradients are
    divided by the size. The other arguments are those of `DistributedOptimizer`. Do not use it with a `KerasState`,
    which keeps one model for all workers.

    Raises:
        UsageError: the arguments contradict each other, or a local layer is not a Keras layer.
    """
    given = {each: value for each, value in locals().items() if each != "local_layers"}
    distributed = DistributedOptimizer(**given)
    layers: Iterable[Any] = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    for layer in layers:
        if layer is not None and not isinstance(layer, keras.layers.Layer):
            raise UsageError(f"local_layers must be Keras layers; got {layer!r}")
        for variable in [] if layer is None else layer.trainable_variables:
            distributed.register_local_var(variable)
    return distributed

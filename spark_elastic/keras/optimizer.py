"""DistributedOptimizer: gradients are averaged over the world before each step of a Keras optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras

from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.collective.reduction import Average, ReduceOp
from spark_elastic.errors import UsageError
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.compression import Compression
from spark_elastic.keras.variables import has_value, outside_of_graphs

_ABOVE = 12
"""Frames between an attribute's setter and the function that sets it, at most: Keras and TensorFlow track both."""


class DistributedOptimizerMixin:
    """What `DistributedOptimizer` puts in front of an optimizer's own class."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The optimizer's own class, so that Keras saves it under that name and loads it without this package."""
        return type(self).__mro__[2]

    _wrap: Callable[[Any], Any]
    """Makes a plain optimizer distributed in the same way."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **more: Any) -> Any:
        """An optimizer of this configuration, distributed in the same way."""
        plain = cls.__mro__[2]
        return cls._wrap(plain.from_config(config, **more))  # type: ignore[attr-defined]

    @property
    def _steps(self) -> Any:
        """Reduces the gradients; None if an optimizer around this one does."""
        return self.__dict__.get("_distributed_steps")

    @property
    def backward_passes_per_step(self) -> int:
        """Calls whose gradients are added up before they are reduced."""
        return 1 if self._steps is None else int(self._steps.passes)

    def steps_applied(self) -> Any:
        """Steps reduced in this process, with those that a `LossScaleOptimizer` has skipped; a tensor in a graph."""
        return self._steps.applied()

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)  # type: ignore[misc]
        if self._steps is not None:
            self._steps.build(variables)

    def register_local_var(self, var: Any) -> None:
        """Have the gradient of this variable stay this worker's own; before the first step."""
        self.__dict__.setdefault("_local_variables", []).append(_backends_own(var))

    def _places_of_local(self, variables: Sequence[Any]) -> list[int]:
        local = {id(variable) for variable in self.__dict__.get("_local_variables", ())}
        return [at for at, variable in enumerate(variables) if id(_backends_own(variable)) in local] if local else []

    def compute_gradients(self, loss: Any, var_list: Sequence[Any], tape: Any = None) -> list[tuple[Any, Any]]:
        """Pairs of (gradient, variable), reduced over the members; `apply_gradients` does not reduce them again.

        With `backward_passes_per_step` they are this member's own, and `apply_gradients` reduces them when it is time.

        Args:
            loss: a function without arguments, or a tensor that `tape`, a `tf.GradientTape`, has seen.

        Raises: HorovodInternalError: a peer is gone.
        """
        import tensorflow as tf

        if tape is None:
            with tf.GradientTape() as tape:
                loss = loss()
        variables = list(var_list)
        own = [_backends_own(variable) for variable in variables]
        grads = tape.gradient(loss, own)
        if self._steps is not None and self.backward_passes_per_step == 1:
            grads = self._steps.reduced(grads, self._places_of_local(variables))
            self.__dict__["_reduced_already"] = grads
        return list(zip(grads, variables, strict=True))

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        return self.compute_gradients(loss, var_list, tape)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients, then update the variables with them.

        Raises:
            HorovodInternalError: a peer is gone; no variable has been touched. Out of a `tf.function` it comes as one
                of TensorFlow's errors; `elastic.run` knows it.
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
        local = own._places_of_local(own._trainable_variables if variables is None else variables)
        numbers = list(range(len(grads)))
        if variables is not None and self._steps.passes > 1:
            own._check_variables_are_known(variables)
            numbers = [own._get_variable_index(variable) for variable in variables]
        self._steps.step(grads, numbers, lambda reduced: plain(reduced, variables), local)

    # A LossScaleOptimizer that is put around this one takes its scaling away; `compile` does that on its own under
    # mixed_float16. It skips steps whose gradients are not finite, and whether they are it must look at after the
    # reduction: otherwise one member skips a step and the others wait for it. So it does the reducing from now on.

    @property
    def loss_scale_factor(self) -> Any:
        # TensorFlow's tracking asks for the old value first, and sets none that is the same
        if sys._getframe(1).f_code.co_name == "__setattr__":
            self._yield_to_loss_scaling(sys._getframe(2))
        return self.__dict__.get("loss_scale_factor")

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        self.__dict__["loss_scale_factor"] = value
        self._yield_to_loss_scaling(sys._getframe(1))

    def _yield_to_loss_scaling(self, caller: Any) -> None:
        around = _loss_scaling_around(self, caller) if self._steps is not None else None
        if around is not None:
            if not isinstance(around, DistributedOptimizerMixin):
                _become_distributed(around, self._steps)
            self.__dict__["_distributed_steps"] = None


def _loss_scaling_around(inner: Any, caller: Any) -> Any:
    """The `LossScaleOptimizer` that is being made around `inner`, if that is what its attribute is set for."""
    for _ in range(_ABOVE):
        if caller is None:
            return None
        owner = caller.f_locals.get("self")
        if caller.f_code.co_name == "__init__" and isinstance(owner, keras.optimizers.LossScaleOptimizer):
            return owner if owner.inner_optimizer is inner else None
        caller = caller.f_back
    return None


def _distributed_class(kind: type, wrap: Callable[[Any], Any]) -> type:
    names = {"__module__": kind.__module__, "_wrap": staticmethod(wrap)}
    return type(kind.__name__, (DistributedOptimizerMixin, kind), names)


def _backends_own(variable: Any) -> Any:
    """The variable of TensorFlow or parameter of torch that a Keras variable stands for."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def _become_distributed(optimizer: Any, steps: Any) -> None:
    optimizer.__dict__["_distributed_steps"] = steps
    kind = type(optimizer)
    object.__setattr__(optimizer, "__class__", _distributed_class(kind, DistributedOptimizer))
    if optimizer.built:
        steps.build(optimizer._trainable_variables)


def build_for(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build an optimizer that is about to step. Also where that is traced, its variables have their values at once."""
    made_here = not all(map(has_value, variables))  # by the same function
    with nullcontext() if made_here else outside_of_graphs(), keras.name_scope(optimizer.name):
        optimizer.build(variables)
    optimizer.built = True


def reduces(optimizer: Any) -> bool:
    """Whether this optimizer itself reduces gradients."""
    return isinstance(optimizer, DistributedOptimizerMixin) and optimizer._steps is not None


def is_distributed(optimizer: Any) -> bool:
    """Whether this optimizer, or one inside of it, reduces gradients."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return isinstance(optimizer, DistributedOptimizerMixin) or isinstance(inner, DistributedOptimizerMixin)


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
    """The same optimizer, stepping with the gradients of all members; for `compile`, or for a loop of one's own.

    The result is an instance of a subclass of the optimizer's class and shares its variables. It is saved as what it
    was, and `load_model` makes it distributed again. What an optimizer does with gradients (clipping, loss scaling,
    weight decay, averages of the weights, `gradient_accumulation_steps`) it does with the reduced ones.

    Args:
        optimizer: a Keras optimizer, built or not; or its name.
        name: replaces the optimizer's name.
        device_dense, device_sparse, num_groups, groups: accepted for Horovod's sake; one message is as large as pays.
        compression: of what is sent.
        sparse_as_dense: reduce sparse gradients as dense ones instead of gathering them.
        gradient_predivide_factor: gradients are divided by this before the sum and by size / factor after it.
        op: Average or Sum.
        backward_passes_per_step: calls whose gradients are added up here before they are reduced and applied. The
            optimizer's `iterations` count what is applied.
        average_aggregated_gradients: divide what was added up by their number.
        process_set: the processes to reduce over.
        scale_local_gradients: gradients of variables that were given to `register_local_var` are divided by the size.

    Raises: UsageError: arguments that contradict each other.
    """
    kept = keras.optimizers.get(optimizer)
    if is_distributed(kept):
        raise UsageError("this optimizer is a DistributedOptimizer already; wrap the plain one, once")
    if backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}")
    if BACKEND == "tensorflow":
        from spark_elastic.keras.tensorflow_steps import Steps
        from spark_elastic.tensorflow.gradients import GradientReducer

        reducer: Any = GradientReducer(
            op=op,
            compression=compression,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        steps: Any = Steps(reducer, backward_passes_per_step, average_aggregated_gradients)
    else:
        from spark_elastic.collective.fused import FusedReduction
        from spark_elastic.keras.torch_steps import Steps as TorchSteps

        fused = FusedReduction(
            op=op, compression=compression, predivide=gradient_predivide_factor, process_set=process_set
        )
        steps = TorchSteps(fused, backward_passes_per_step, average_aggregated_gradients)
    if scale_local_gradients:
        steps.divide_local = _size_of(process_set)

    def wrap(plain: Any) -> Any:
        return DistributedOptimizer(
            plain,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )

    wrapped: Any = _distributed_class(type(kept), wrap)
    instance = object.__new__(wrapped)
    instance.__dict__.update(kept.__dict__)
    instance.__dict__["_distributed_steps"] = steps
    if name is not None:
        instance.__dict__["name"] = name
    if instance.built:
        steps.build(instance._trainable_variables)
    return instance


def _size_of(process_set: ProcessSet) -> Callable[[], Any]:
    if BACKEND != "tensorflow":
        return process_set.size
    from spark_elastic.tensorflow.operations import size_op

    return lambda: size_op(process_set)


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
    """As `DistributedOptimizer`, without reducing the gradients of some layers.

    Each worker has these layers for itself. A `KerasState` keeps one model for all: do not put it together with them.

    Args:
        local_layers: a layer or several. scale_local_gradients: their gradients are divided by the size.
    """
    made = DistributedOptimizer(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    layers: Iterable[Any] = local_layers if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    for layer in layers:
        if layer is not None and not isinstance(layer, keras.layers.Layer):
            raise UsageError(f"local_layers must be Keras layers, and {layer!r} is none")
        for variable in [] if layer is None else layer.trainable_variables:
            made.register_local_var(variable)
    return made

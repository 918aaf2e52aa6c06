"""Virtual workers of Keras on TensorFlow: the result has the same bits for any number of real workers."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch

from spark_elastic.collective.shard_sums import PartialSums, ShardReduction, rows_of, tree_sum
from spark_elastic.data.order.permutation import derived_key
from spark_elastic.elastic.own_generators import OwnGenerators
from spark_elastic.elastic.virtual_shards import (
    Environment,
    EnvironmentCheck,
    VirtualShard,
    check_same_training,
    processor,
)
from spark_elastic.errors import UsageError
from spark_elastic.keras.backend import describe
from spark_elastic.keras.elastic.random_state import own_kinds, random_states, two_seeds
from spark_elastic.keras.elastic.shard_variables import ShardVariables, buffers_of
from spark_elastic.keras.optimizer import reduces
from spark_elastic.keras.sync_batch_normalization import is_synchronised
from spark_elastic.tensorflow.host import array_from, array_of, native, torch_of

log = logging.getLogger("spark_elastic.keras")

_all: weakref.WeakSet[KerasVirtualWorkers] = weakref.WeakSet()
"""The virtual workers of this process: a loop may have several, such as one for each of two models."""


class KerasVirtualShard(VirtualShard):
    """A `VirtualShard` that is given its gradients, because variables of Keras hold none."""

    def __init__(self, *args: Any, take: Callable[[Sequence[Any]], list[torch.Tensor]]) -> None:
        super().__init__(*args)
        self.taken: list[torch.Tensor] | None = None
        """The gradients so far. Until a second call they are TensorFlow's, which may use their memory elsewhere too."""
        self.own = False
        """`taken` may be changed."""
        self._take = take

    def add_gradients(self, gradients: Iterable[Any]) -> None:
        """Take the gradients of this shard's share of the loss; those of several calls are added up.

        Args:
            gradients: One for each of the variables that are trained, in their order: a tensor, a `tf.IndexedSlices`,
                which is added up as a dense tensor, or None.
        """
        found = self._take(list(gradients))
        if self.taken is None:
            self.taken = found
        elif found:
            self.taken, self.own = list(torch._foreach_add(self.taken, found)), True


class KerasVirtualWorkers:
    """Computes each batch in a fixed number of shards, of which each worker of the present world computes some.

    Made by `hvd.elastic.virtual_workers`, which describes the arguments. Put it into the `KerasState` and into your own
    checkpoints (`state_dict`): it warns when a training continues where its bits may differ.
    """

    def __init__(
        self,
        count: int,
        model: Any,
        optimizer: Any,
        *,
        seed: int = 0,
        threads: int = 1,
        sums: Iterable[str] = (),
        metrics: Iterable[Any] = (),
        variables: Sequence[Any] | None = None,
        drawing: Mapping[str, Any] | None = None,
    ) -> None:
        if count < 1 or threads < 1:
            raise UsageError(f"virtual workers and threads must be at least 1, not {count} and {threads}")
        metrics = list(metrics)
        _check(model, optimizer, metrics)
        use_threads(threads)
        tf.config.experimental.enable_op_determinism()
        self.count, self.seed, self.threads = count, seed, threads
        self.sums: dict[str, float] = {}
        """The sums of the numbers that the shards of the last batch have added, by name, the same on all workers."""
        self._names = {name: place for place, name in enumerate(sums)}
        self._model = model
        self._only = variables
        self._gradients: list[Any] | None = None
        """The gradients of the last whole batch; None: there are none."""
        self._like: list[torch.Tensor] = []
        self._given = torch.zeros(0)
        """For each variable that is trained, a number above 0 if a shard of the present batch had its gradient."""
        self._check = EnvironmentCheck(environment(threads), log)
        self.environment = self._check.environment
        """What the bits of the result depend on besides the program and its data."""
        self._drawing = {"model": model, "metrics": metrics, **(drawing or {})}
        self._own = OwnGenerators(self._drawing, _ENTERED, own_kinds(model))
        about = f"seed {seed}, {threads} threads, sums {list(self._names)}, generators {self._own.places}"
        self._reduction = ShardReduction(count, about, self._check.compare_members)
        self._has_computed = False
        """A batch was computed: all generators of the model have been made."""
        self._variables = ShardVariables(model, metrics, random_states.variables, self._reduction.gather)
        self._variables.begin_step()
        _all.add(self)
        self._save_random_states(self._seed((), count))  # for what is drawn before the first batch

    # --- one batch ------------------------------------------------------------------------------------

    def shards(self, rows: int, step: int, training: bool = True) -> Generator[KerasVirtualShard]:
        """Return this worker's shards of a batch, one after another; go through all of them.

        Give each the gradients of its share of the batch's loss, which is the sum over its rows / `rows`
        (`shard.add_gradients`). At the end of the iteration, which waits for the other workers, `gradients` are those
        of the whole batch and `sums` has the sums.

        While a shard is computed, random numbers of the model's layers and generators, Keras, TensorFlow, numpy and
        `random` are those of (seed, step, shard); after the last one, those of (seed, step). If the step fails, they
        are as before it.

        Args:
            rows: The rows of the batch; shards are empty, and left out, if there are fewer than virtual workers.
            step: The number of the step, which must be the same on all workers, and again if the step is made again.
            training: False: only the sums and metrics are computed, and other variables keep their values.

        Raises:
            HorovodInternalError: A peer is gone. Nothing was changed.
            UsageError: Shards have no gradients, have changed a variable in ways that cannot be combined, or the first
                shards have made a random generator in the model.
        """
        bounds = [rows_of(shard, self.count, rows) for shard in self._reduction.shards()]
        numbers = torch.zeros((self.count, len(self._names)), dtype=torch.float64)
        yield from self.compute(bounds, (step,), numbers, training=training)
        totals = tree_sum(numbers).tolist()
        self.sums = {name: totals[place] for name, place in self._names.items()}

    def compute(
        self,
        bounds: Sequence[tuple[int, int]],
        key: tuple[int, ...],
        numbers: torch.Tensor,
        vote: float = 0.0,
        training: bool = True,
    ) -> Generator[KerasVirtualShard, None, float]:
        """Return this worker's shards as `shards` does, with any bounds.

        Args:
            bounds: Where each of this worker's shards begins and ends.
            key: The place of the step in the training.
            numbers: A matrix of float64, a row for each shard: those of this worker's shards are filled by the caller,
                and all of them afterwards.
            vote: A whole number, for example of workers that want to stop.
            training: False: no gradients are expected.

        Returns:
            The sum of all workers' `vote`.
        """
        self._gradients = None
        trained = self._trained() if training else []
        width, summed = self._variables.begin_step(), numbers.shape[1]
        matrix = torch.zeros((self.count, 1 + summed + width), dtype=torch.float64)
        self._given = torch.zeros(len(trained), dtype=torch.float64)
        sums = self._reduction.partial_sums()
        others = _OtherVariables(self)
        try:
            for index, (start, stop) in zip(self._reduction.shards(), bounds, strict=True):
                if start == stop:
                    sums.add(None)
                    continue
                self._seed(key, index)
                shard = KerasVirtualShard(index, start, stop, self._names, numbers[index], take=self._take)
                yield shard
                if training and shard.taken is None:
                    raise UsageError(
                        f"shard {index} of the batch was given no gradients: call shard.add_gradients for each, or "
                        "workers.shards(..., training=False) where nothing is trained"
                    )
                sums.add(shard.taken if training else [], given=shard.own)
                matrix[index, 0] = stop - start
                matrix[index, 1 : 1 + summed] = numbers[index]
                matrix[index, 1 + summed :] = self._variables.end_shard(index)
            others.check()
            self._variables.check_metrics()
            if not self._has_computed:
                self._own.check_none_was_made(self._drawing)
                self._has_computed = True
            vote = self._exchange(trained, sums, matrix, vote)
            numbers.copy_(matrix[:, 1 : 1 + summed])
            self._variables.combine(matrix[:, 1 + summed :], matrix[:, 0], training)
        except BaseException:
            self._gradients = None
            self._variables.put_back()
            random_states.put_back()
            self._own.put_back()
            raise
        seeds = self._seed(key, self.count, keep=True)
        self._save_random_states(seeds)
        return vote

    @property
    def gradients(self) -> list[Any]:
        """The gradients of the whole batch, one for each of the variables that are trained, in their order.

        None for a variable of which no shard had a gradient.
        """
        if self._gradients is None:
            raise UsageError(
                "there are no gradients of a whole batch: go through all of workers.shards(...) before each step of "
                "the optimizer"
            )
        return self._gradients

    @property
    def variables(self) -> list[Any]:
        """The variables that are trained; those of the model, unless others were given."""
        return list(self._model.trainable_variables if self._only is None else self._only)

    def seed_shard(self, key: tuple[int, ...], index: int) -> None:
        """Seed all generators for one shard of the step with this key, and leave other variables as they are."""
        self._seed(key, index, keep=True)

    @contextmanager
    def variables_kept(self) -> Iterator[Callable[[], None]]:
        """Return a context that puts the model's variables back at its end, and a function that does so at once."""
        self._variables.begin_step()
        try:
            yield self._variables.put_back
        finally:
            self._variables.put_back()

    def gather(self, numbers: torch.Tensor) -> torch.Tensor:
        """Give all workers the rows of a float64 tensor that each has filled for its own shards, in place."""
        return self._reduction.gather(numbers)

    def own_shards(self) -> range:
        """Return the shards that this worker computes in the present world."""
        return self._reduction.shards()

    def _seed(self, key: tuple[int, ...], index: int, keep: bool = False) -> tuple[int, int]:
        """Seed all generators; the other variables get their values from before the step, unless they are to `keep`.

        Returns:
            The seeds of numpy and the like, and of the global generators that are variables.
        """
        seed = derived_key(self.seed, *key, index)
        random_states.seed(seed)
        self._own.seed(seed)
        own = len(self._variables.seeds) - len(_GLOBAL)
        values: list[Any] = [two_seeds(derived_key(seed, number)) for number in range(own)]
        values += random_states.values(derived_key(seed, own))
        (self._variables.set_seeds if keep else self._variables.begin_shard)(values)
        return seed, derived_key(seed, own)

    def _save_random_states(self, seeds: tuple[int, int]) -> None:
        """Save the states of all generators after a step; `seeds`: what `_seed` has returned."""
        random_states.save_seeded(*seeds)
        self._own.save_seeded(seeds[0])

    def _trained(self) -> list[torch.Tensor]:
        """Return tensors with the shapes and types of the variables that are trained."""
        kinds = [(tuple(each.shape), describe(each).dtype) for each in self.variables]
        if [(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in self._like] != kinds:
            self._like = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in kinds]
        return self._like

    def _take(self, gradients: Sequence[Any]) -> list[torch.Tensor]:
        variables = self.variables
        if len(gradients) != len(variables):
            raise UsageError(
                f"shard.add_gradients got {len(gradients)} gradients for the {len(variables)} trainable variables of "
                "the model; give those for model.trainable_variables, in their order"
            )
        taken = []
        for at, (gradient, like, variable) in enumerate(zip(gradients, self._like, variables, strict=True)):
            if gradient is None:
                taken.append(torch.zeros_like(like))
                continue
            self._given[at] = 1.0
            dense = tf.convert_to_tensor(gradient)
            if tuple(dense.shape) != tuple(like.shape) or dense.dtype != native(variable).dtype:
                raise UsageError(
                    f"the gradient of {describe(variable)} is {dense.dtype.name} {list(dense.shape)}; give the "
                    "gradients for model.trainable_variables, in their order"
                )
            taken.append(torch_of(array_of(dense)))
        return taken

    def _exchange(self, like: Sequence[torch.Tensor], sums: PartialSums, matrix: torch.Tensor, vote: float) -> float:
        vector = torch.cat([matrix.view(-1), self._given, torch.tensor([vote], dtype=torch.float64)])
        results = self._reduction.exchange(like, sums, vector)
        matrix.copy_(vector[: matrix.numel()].view(matrix.shape))
        if like:  # copied, because the next step uses the same memory
            self._gradients = [
                tf.constant(array_from(result.contiguous())) if count else None
                for result, count in zip(results, vector[matrix.numel() : -1].tolist(), strict=True)
            ]
        return float(vector[-1])

    # --- what the bits depend on ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of virtual workers, the seed, random states, and what the bits of the result depend on."""
        return {
            "count": self.count,
            "seed": self.seed,
            "environment": dict(self.environment),
            "random": random_states.encoded(),
            "generators": self._own.encoded(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set random states, compare with the training that is continued, and warn if bits may differ from now on.

        Raises:
            UsageError: The number of virtual workers or the seed differs: the result would be another.
        """
        check_same_training(state, self.count, self.seed)
        self.compare_environment(state["environment"])
        random_states.load(state["random"])
        self._own.load(state.get("generators", {}))

    def compare_environment(self, then: Mapping[str, str]) -> None:
        """Warn of what differs between the environment in which the training was begun and the present one."""
        self._check.compare(then)


class _OtherVariables:
    """What the shards of these virtual workers must leave alone: moving statistics and the like of other models."""

    def __init__(self, workers: KerasVirtualWorkers) -> None:
        others = [each for each in _all if each is not workers]
        own = {id(each) for each in workers._model.variables} if others else set()
        found = {id(each): each for other in others for each in buffers_of(other._model) if id(each) not in own}
        self._before = [(each, native(each).read_value()) for each in found.values()]

    def check(self) -> None:
        """Raise UsageError if a variable was changed."""
        for variable, before in self._before:
            if not np.array_equal(native(variable).numpy(), before.numpy()):
                raise UsageError(
                    f"a shard has changed {describe(variable).path}, which is not one of the model of these virtual "
                    "workers, but of other ones: each worker would keep its own value. Give both the same model, which "
                    "has all layers that their shards call"
                )


_ENTERED = (keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, tf.Module)
"""Classes whose instances may have generators of their own; losses and metrics of Keras hold functions."""
_GLOBAL = ("Keras", "TensorFlow")
"""The global generators, whose seeds come after those of the model."""


def _check(model: Any, optimizer: Any, metrics: Sequence[Any]) -> None:
    if not isinstance(model, keras.layers.Layer) or not model.built:
        raise UsageError("virtual workers need a built Keras model: call it on some rows, or give it a keras.Input")
    if reduces(optimizer):
        raise UsageError(
            "virtual workers need the optimizer itself, not a DistributedOptimizer, whose sums depend on the number of "
            "workers"
        )
    if is_synchronised(model):
        raise UsageError(
            "the model has synchronised batch normalisation, whose statistics are those of the real workers' rows; use "
            "keras.layers.BatchNormalization: virtual workers take the statistics of each shard"
        )
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise UsageError(
                f"{layer.name} is a SpectralNormalization, which changes a trained weight in its forward pass; virtual "
                "workers have no rule to combine what the shards leave in it"
            )
    for metric in metrics:
        for variable in metric.variables:
            if getattr(variable, "aggregation", "sum") != "sum":
                raise UsageError(
                    f"the metric {metric.name} keeps {variable.name} with aggregation={variable.aggregation!r}, and "
                    "only sums can be added up over shards"
                )
    for variable in model.variables:
        if "GPU" in str(native(variable).device):
            raise UsageError(
                f"{describe(variable).path} is on {native(variable).device}; virtual workers compute on the CPU: the "
                "bits of a GPU's sums are not guaranteed. Hide the GPU: tf.config.set_visible_devices([], 'GPU')"
            )


def use_threads(count: int) -> None:
    """Let TensorFlow compute with this number of threads, on which bits may depend.

    Raises:
        UsageError: TensorFlow runs already, with another number.
    """
    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
    except RuntimeError:
        # the variable is used where no number was set; without it there is a thread for each core
        found = tf.config.threading.get_intra_op_parallelism_threads() or int(os.environ.get(_THREADS, "0"))
        if found != count:
            raise UsageError(
                f"TensorFlow runs already in this process, with {found or 'as many threads as there are cores'}, and "
                f"virtual workers need {count}: call tf.config.threading.set_intra_op_parallelism_threads({count}) "
                f"before anything else of TensorFlow, or set {_THREADS}={count} in the environment"
            ) from None


# --- the environment ----------------------------------------------------------------------------------

_THREADS = "TF_NUM_INTRAOP_THREADS"
_VARIABLES = ("TF_ENABLE_ONEDNN_OPTS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "TF_XLA_FLAGS", "XLA_FLAGS")


def environment(threads: int) -> Environment:
    """Return what the bits of a computation depend on besides the program and its data."""
    subnormal = float(tf.constant(1e-310, tf.float64) + tf.constant(0.0, tf.float64))
    return {
        "tensorflow": str(tf.__version__),
        "keras": str(keras.__version__),
        "torch": str(torch.__version__),  # adds up the shards
        "numpy": np.__version__,
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(),
        "threads": str(threads),
        "subnormal numbers": "kept" if subnormal else "flushed to zero",
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }

"""Elastic training with Keras: the loop, the states, the dataset and the callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from spark_elastic.elastic import loop
from spark_elastic.elastic.handlers import StateHandler
from spark_elastic.elastic.state import ObjectState, State
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError
from spark_elastic.keras.backend import BACKEND
from spark_elastic.keras.elastic.fit import (
    CommitStateCallback,
    ElasticCallback,
    ElasticDataset,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from spark_elastic.keras.elastic.state import KerasState

if TYPE_CHECKING:
    from spark_elastic.keras.elastic.virtual_shards import KerasVirtualWorkers

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate `func(state, ...)` so that it is called again whenever workers are lost or arrive.

    Each time the world has changed, the reset callbacks are called, the state is synchronised and `func` is called
    again. Before `func`, call only collectives that a newcomer calls at the same time.
    """
    if BACKEND == "torch":
        return loop.run(func)
    from spark_elastic.tensorflow.host import lost_peers_translated

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with lost_peers_translated():
            return func(state, *args, **kwargs)

    return loop.run(wrapper)  # type: ignore[arg-type]


def virtual_workers(
    count: int,
    model: Any,
    optimizer: Any,
    *,
    seed: int = 0,
    threads: int = 1,
    sums: Iterable[str] = (),
    metrics: Iterable[Any] = (),
    generators: Iterable[Any] = (),
) -> KerasVirtualWorkers:
    """Return virtual workers, with which a loop gives the same bits for any number of workers, kills and arrivals.

    ::

        workers = hvd.elastic.virtual_workers(8, model, optimizer, seed=1, sums=["loss"])

        for shard in workers.shards(len(batch), step=state.step):
            rows = batch[shard.rows]
            with tf.GradientTape() as tape:
                losses = loss_function(labels[rows], model(features[rows], training=True))
                loss = tf.reduce_sum(losses) / len(batch)
            shard.add_gradients(tape.gradient(loss, model.trainable_variables))
            shard.add("loss", loss)
        optimizer.apply(workers.gradients, model.trainable_variables)

    Args:
        count: The number of shards that each batch is cut into, the same for the whole training. Real workers beyond it
            have nothing to compute.
        model: The built model, on the CPU. Batch normalisation takes the statistics of each shard by itself.
        optimizer: A plain Keras optimizer, not a `DistributedOptimizer`.
        seed: The seed of the shards' random numbers. All generators are seeded at once.
        threads: The number of TensorFlow's threads in this process. Bits may depend on it.
        sums: The names of numbers that shards `add`.
        metrics: Metrics of Keras that shards update. Afterwards they have the rows of all shards, on all workers.
        generators: More generators of TensorFlow, Keras, numpy or `random` that shards draw from, or objects that have
            some, such as a loss. Those of the model are found in its layers' attributes and in what its methods refer
            to.

    Raises:
        UsageError: The model or the optimizer cannot be used so, or TensorFlow runs already with other threads.
    """
    if BACKEND != "tensorflow":
        raise UsageError(
            f"virtual workers need Keras on TensorFlow, and Keras runs on {BACKEND} here; set KERAS_BACKEND=tensorflow "
            "before keras is imported, or write the model in PyTorch and use spark_elastic.torch"
        )
    from spark_elastic.keras.elastic.virtual_shards import KerasVirtualWorkers

    drawing = {f"generators[{number}]": each for number, each in enumerate(generators)}
    return KerasVirtualWorkers(
        count, model, optimizer, seed=seed, threads=threads, sums=sums, metrics=metrics, drawing=drawing
    )


__all__ = [
    "CommitStateCallback",
    "ElasticCallback",
    "ElasticDataset",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "StateHandler",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "virtual_workers",
]

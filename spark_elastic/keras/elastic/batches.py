"""The batches of an `ElasticDataset`: which rows a member takes, and TensorFlow's tensors of them.

`deal` is the division of an epoch; `TensorFlowBatches` is what Keras iterates over on TensorFlow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from spark_elastic.data.order.permutation import EpochOrder

Indices = npt.NDArray[np.int64]


def deal(order: EpochOrder, left: range, batches: int, rank: int, size: int) -> list[Indices]:
    """Return the rows that a member takes of the batches with the numbers `left`, at least one of each.

    The order of an epoch is divided into `batches` nearly equal parts, whatever the size of the world; members take the
    rows of a part in turns. If a part has fewer rows than there are members, two members take the same row.
    """
    numbers = np.arange(left.start, max(left.start, left.stop), dtype=np.int64)
    starts, stops = numbers * order.rows // batches, (numbers + 1) * order.rows // batches
    counts = np.maximum(-(-(stops - starts - rank) // size), 1)
    firsts = starts + np.where(stops - starts > rank, rank, rank % np.maximum(stops - starts, 1))
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    # all at once: the order of a thousand rows costs little more than that of ten
    within = np.arange(edges[-1], dtype=np.int64) - np.repeat(edges[:-1], counts)
    rows = order[np.repeat(firsts, counts) + size * within]
    return [rows[start:stop] for start, stop in itertools.pairwise(edges)]


class TensorFlowBatches:
    """Rows of some arrays, in any structure, as batches of tensors. Keras iterates over it as over a `tf.data.Dataset`.

    The dataset is made once, because tracing its functions takes longer than entering `fit`; it reads from a variable
    which rows come next.
    """

    def __init__(self, arrays: Any) -> None:
        import tensorflow as tf

        self._dataset: Any = None
        with tf.device("CPU"):  # tf.data runs there
            self._tensors = keras.tree.map_structure(tf.constant, arrays)
            self._plan = tf.Variable(np.zeros(2, np.int64), shape=[None], trainable=False)
            """The number of batches n; their n + 1 edges; their rows."""

    def set_rows(self, shares: Sequence[Indices]) -> None:
        """Make the batches of the next iterator those of `shares`."""
        edges = np.cumsum([0, *map(len, shares)], dtype=np.int64)
        self._plan.assign(np.concatenate([np.array([len(shares)], np.int64), edges, *shares]))

    def __iter__(self) -> Iterator[Any]:
        if self._dataset is None:
            self._dataset = self._made()
        return iter(self._dataset)

    def _made(self) -> Any:
        import tensorflow as tf

        def batch_at(number: Any) -> Any:
            plan = self._plan.read_value()
            rows = plan[2 + plan[0] :][plan[1 + number] : plan[2 + number]]
            return keras.tree.map_structure(lambda tensor: tf.gather(tensor, rows), self._tensors)

        def numbers_of_batches(_: Any) -> Any:
            return tf.data.Dataset.range(self._plan.read_value()[0])

        plain = tf.autograph.experimental.do_not_convert
        # the variable is read when an epoch begins, not when this is made
        batches = tf.data.Dataset.range(1).flat_map(plain(numbers_of_batches)).map(plain(batch_at))
        # Autotuning has a thread that sleeps 10 ms, then 20 ms, and so on up to a minute. An iterator that is given up
        # waits for the end of that sleep. The thread may also read ahead in a world that is over.
        options = tf.data.Options()
        options.autotune.enabled = False
        return batches.prefetch(2).with_options(options)

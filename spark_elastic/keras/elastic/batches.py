"""The batches of an `ElasticDataset`: which rows a member takes, and TensorFlow's tensors of them.

`deal` is the division of an epoch; `TensorFlowBatches` is what Keras iterates over on TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import keras
import numpy as np
import numpy.typing as npt

from spark_elastic.data.order.permutation import EpochOrder

Indices = npt.NDArray[np.int64]


class DealtRows(Sequence[Indices]):
    """A member's rows of several batches, each an array.

    Args:
        rows: The rows of all batches, one batch's after another's.
        edges: The index in `rows` at which each batch begins, and the index behind the last one.
    """

    def __init__(self, rows: Indices, edges: Indices) -> None:
        self.rows = rows
        self.edges = edges

    def __len__(self) -> int:
        return len(self.edges) - 1

    @overload
    def __getitem__(self, number: int) -> Indices: ...
    @overload
    def __getitem__(self, number: slice) -> list[Indices]: ...
    def __getitem__(self, number: int | slice) -> Indices | list[Indices]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        first = range(len(self))[number]
        return self.rows[self.edges[first] : self.edges[first + 1]]


def deal(order: EpochOrder, left: range, batches: int, rank: int, size: int) -> DealtRows:
    """Return the rows that a member takes of some batches, at least one of each.

    The order of an epoch is divided into `batches` nearly equal parts, whatever the size of the world; members take the
    rows of a part in turns. If a part has fewer rows than there are members, two members take the same row.

    Args:
        order: The order of the epoch's rows.
        left: The numbers of the batches, from 0.
        batches: The number of batches in the epoch.
        rank: The rank of the member.
        size: The number of members.
    """
    numbers = np.arange(left.start, max(left.start, left.stop), dtype=np.int64)
    starts, stops = numbers * order.rows // batches, (numbers + 1) * order.rows // batches
    counts = np.maximum(-(-(stops - starts - rank) // size), 1)
    firsts = starts + np.where(stops - starts > rank, rank, rank % np.maximum(stops - starts, 1))
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    # all at once: the order of a thousand rows costs little more than that of ten
    within = np.arange(edges[-1], dtype=np.int64) - np.repeat(edges[:-1], counts)
    return DealtRows(order[np.repeat(firsts, counts) + size * within], edges)


def without_autotuning(dataset: Any) -> Any:
    """Return a dataset of tf.data that does not tune itself.

    Autotuning has a thread that sleeps 10 ms, then 20 ms, and so on up to a minute. An iterator that is given up waits
    for the end of that sleep: about as long as it has existed. The thread may also read ahead in a world that is over.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


class TensorFlowBatches:
    """Rows of some arrays as batches of tensors. Keras iterates over it as over a `tf.data.Dataset`.

    A new iterator of tf.data costs more than ten milliseconds, because it instantiates the functions of its dataset.
    So one iterator serves all epochs. Its dataset has no end; it reads from a variable which rows come next. Batches
    that it has read ahead when the rows change are dropped: an empty batch marks the beginning of the new ones.

    Args:
        arrays: Arrays with rows in their first dimension, in any structure.
    """

    def __init__(self, arrays: Any) -> None:
        import tensorflow as tf

        self._changes = 0
        self._endless: Any = None
        self._with_end: Any = None
        self._has_end = True
        with tf.device("CPU"):  # tf.data runs there
            self._tensors = keras.tree.map_structure(tf.constant, arrays)
            self._plan = tf.Variable(np.zeros(4, np.int64), shape=[None], trainable=False)
            """The number of changes; the number of batches n; their n + 1 edges; their rows, and one row more."""
            self._begun = tf.Variable(np.zeros(2, np.int64), trainable=False)
            """The change whose batches are read at present, and the element at which they begin."""

    def set_rows(self, shares: DealtRows, *, with_end: bool) -> None:
        """Make the next batches those of `shares`.

        Args:
            shares: The rows of each batch.
            with_end: The iterator has to end behind the last batch, so it is a new one.
        """
        self._changes += 1
        head = np.array([self._changes, len(shares)], np.int64)
        self._plan.assign(np.concatenate([head, shares.edges, shares.rows, np.zeros(1, np.int64)]))
        self._has_end = with_end
        if with_end:
            return
        if self._endless is None:
            self._endless = iter(self._endless_dataset())
        while len(keras.tree.flatten(next(self._endless))[0]):
            pass

    def __iter__(self) -> Iterator[Any]:
        if not self._has_end:
            return self._endless
        if self._with_end is None:  # made once: tracing its functions takes longer than entering `fit`
            self._with_end = self._dataset_with_end()
        return iter(self._with_end)

    def _endless_dataset(self) -> Any:
        import tensorflow as tf

        def batch_at(element: Any) -> Any:
            plan = self._plan.read_value()  # once, so that all parts are of one change
            before = self._begun.read_value()
            begun = tf.where(tf.equal(plan[0], before[0]), before, tf.stack([plan[0], element + 1]))
            self._begun.assign(begun, read_value=False)
            number = element - begun[1]
            count = plan[1]
            start = plan[2 + tf.clip_by_value(number, 0, count)]
            stop = plan[2 + tf.clip_by_value(number + 1, 0, count)]
            # behind the last batch there is the row more: only the first element, of number -1, is empty
            stop += tf.cast(number >= count, tf.int64)
            return self._gathered(plan[3 + count :][start:stop])

        numbers = tf.data.Dataset.range(np.iinfo(np.int64).max)
        return without_autotuning(numbers.map(tf.autograph.experimental.do_not_convert(batch_at)).prefetch(2))

    def _dataset_with_end(self) -> Any:
        import tensorflow as tf

        def batch_at(number: Any) -> Any:
            plan = self._plan.read_value()
            return self._gathered(plan[3 + plan[1] :][plan[2 + number] : plan[3 + number]])

        def numbers_of_batches(_: Any) -> Any:
            return tf.data.Dataset.range(self._plan.read_value()[1])

        plain = tf.autograph.experimental.do_not_convert
        # the variable is read when an epoch begins, not when this is made
        batches = tf.data.Dataset.range(1).flat_map(plain(numbers_of_batches)).map(plain(batch_at))
        return without_autotuning(batches.prefetch(2))

    def _gathered(self, rows: Any) -> Any:
        import tensorflow as tf

        return keras.tree.map_structure(lambda tensor: tf.gather(tensor, rows), self._tensors)

"""What users pass to `model.fit` in an elastic loop: callbacks that keep a `KerasState` up to date, and a dataset.

`ElasticCallback` does all that a state needs. Horovod's three callbacks do a part each; their order does not matter,
because they share a `FitSession`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

# Private: the one kind of input that may say for each epoch anew which batches it has, in Keras 3.4 to 3.15.
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

# Private: the function with which Keras itself weighs arrays, so that the weights are the same.
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from spark_elastic.collective.process import process
from spark_elastic.collective.replicas import VariableComparison
from spark_elastic.data.order.permutation import EpochOrder, Indices
from spark_elastic.elastic.call_stack import calling_method, calling_object
from spark_elastic.errors import UsageError
from spark_elastic.keras.elastic.fit_session import FitSession
from spark_elastic.keras.elastic.state import KerasState

_ENTRIES = ("fit", "evaluate", "predict")
_WITHIN = 10
"""Largest number of calls between `fit` and its dataset."""


def _check_counts(user: Any, verb: str, **needed: bool) -> None:
    """Raise UsageError if the user's state does not have the values by which it counts."""
    for name, is_needed in needed.items():
        if is_needed and name not in user.state.__dict__:
            raise UsageError(
                f"{type(user).__name__} {verb} state.{name}, which the state does not have; create it with "
                f"KerasState(model, {name}=0, ...)"
            )


class _StateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of the callbacks here, for each of which `FitCallbacks` has the session of the state count."""

    counts_batches = False
    counts_epochs = False
    kept_by_state = True
    """The callback has no values that `FitCallbacks` would have to restore."""

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state
        self.session: FitSession = state._steps.fit
        _check_counts(self, "counts in", batch=self.counts_batches, epoch=self.counts_epochs)
        self.session.counts_batches |= self.counts_batches
        self.session.counts_epochs |= self.counts_epochs

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.state.fit_callbacks.attach()


class UpdateBatchStateCallback(_StateCallback):
    """Sets `state.batch` to the batches done in this epoch, including those of earlier calls of `fit`."""

    counts_batches = True


class UpdateEpochStateCallback(_StateCallback):
    """Sets `state.epoch` to the number of epochs done.

    It works with `fit(initial_epoch=state.epoch, epochs=n)` and with `fit(epochs=n - state.epoch)`.
    """

    counts_epochs = True


class CommitStateCallback(_StateCallback):
    """Commits every `batches_per_commit` batches and after each epoch; leaves `fit` when the world is about to change.

    Each batch is a mark, from which training resumes without a return to the commit. The check for updated hosts comes
    before the next batch, not after this one, so that no other callback misses the end of a batch or an epoch.
    """

    def __init__(self, state: KerasState, batches_per_commit: int | None = 1) -> None:
        if batches_per_commit is not None and batches_per_commit < 1:
            raise UsageError(f"batches_per_commit must be at least 1, or None; got {batches_per_commit}")
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self._since_commit = 0
        self._epoch_ended = False

    def on_train_begin(self, logs: Any = None) -> None:
        self.session.marks = True
        VariableComparison.broadcast_follows = self.state._root_unbuilt
        self._since_commit = 0
        self._epoch_ended = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch_ended:
            self._epoch_ended = False
            self._commit()
        if self.session.batches:
            self.state.leave_if_updated()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.fit_callbacks.after_batch = self._mark

    def _mark(self) -> None:
        """Mark the state, or commit it, after the callbacks that come later have seen the end of the batch too."""
        self.state.sync_if_built_late()
        VariableComparison.broadcast_follows = False
        self._since_commit += 1
        if self.batches_per_commit is not None and self._since_commit >= self.batches_per_commit:
            self._commit()
        else:
            self.state.mark_here()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # the commit comes later: if another callback fails in a collective, the end of this epoch has to be repeated
        self._epoch_ended = True

    def on_train_end(self, logs: Any = None) -> None:
        if self._epoch_ended:
            self._epoch_ended = False
            self.state.fit_callbacks.after_training = partial(self.session.commit_before_end, self._commit)

    def _commit(self) -> None:
        self._since_commit = 0
        self.state.commit_here()
        self.state.mark_here()  # the next execution may have several steps, of which some are applied before a failure


class ElasticCallback(CommitStateCallback):
    """Does all that a `KerasState` needs in `model.fit`: counts batches and epochs, commits, leaves for the next world.

    Its position among the callbacks does not matter.

    Args:
        state: A state that was created with `batch=0` and `epoch=0`.
        batches_per_commit: Batches from one commit to the next; None: commit after each epoch only. In both cases a
            lost worker costs no step, because each step is a mark: training returns to a commit only if a collective
            fails that another callback calls between a step and its mark.
    """

    counts_batches = True
    counts_epochs = True

    def __init__(self, state: KerasState, batches_per_commit: int | None = None) -> None:
        super().__init__(state, batches_per_commit)


class ElasticDataset(DataAdapter):  # type: ignore[misc]
    """A dataset of arrays for `model.fit`: one member trains each row once an epoch, however often the world changes.

    Only where a batch has fewer rows than there are members do several members train the same row of it.

    An epoch resumes at `state.epoch` and `state.batch`, so put an `ElasticCallback(state)` among the callbacks of
    `fit`, and call it with `initial_epoch=state.epoch`. A step trains the same rows for any number of members: each
    member takes its share of the batch, and its gradient is weighted by the number of its rows. So the model does not
    depend on the number of members, except for rounding, if its loss is a mean over rows (not a sum, nor over a mask).

    Pass it to `fit` as `x`. `class_weight` of `fit` weighs the rows as it does with arrays, and multiplies
    `sample_weight`. Arguments of `fit` that Keras would ignore raise a UsageError: `y`, `sample_weight`, and another
    `batch_size`, `shuffle` or `steps_per_epoch` than those of the dataset. It is for training alone: validate on arrays
    or on a `tf.data.Dataset`. A state may have several, which are trained one after the other.

    Args:
        x: An array, or a list or dictionary of arrays, as the model takes them; the first dimension is the rows.
        y: The targets, in the same form, or None.
        sample_weight: A weight for each row, or None.
        state: A state that was created with `batch=0` and `epoch=0`.
        batch_size: The largest number of rows of a step on all members together; all steps of an epoch are nearly as
            large.
        shuffle: Use a different order each epoch.
        seed: The seed of the order; the same on all members.
    """

    num_batches = 0
    batch_size = None
    has_partial_batch = False
    partial_batch_size = None

    def __init__(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        state: KerasState,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.state = state
        _check_counts(self, "resumes at", batch=True, epoch=True)
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1; got {batch_size}")
        if y is None and sample_weight is not None:
            raise UsageError("ElasticDataset got a sample_weight without y; Keras weighs the losses of targets only")

        def as_array(values: Any) -> npt.NDArray[Any]:
            array = np.asarray(values)
            return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array

        parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
        self._arrays = keras.tree.lists_to_tuples(keras.tree.map_structure(as_array, parts))  # tf.data stacks lists
        lengths = {len(array) for array in keras.tree.flatten(self._arrays)}
        if len(lengths) != 1 or 0 in lengths:
            raise UsageError(f"all arrays must have the same non-zero length; got lengths {sorted(lengths)}")
        self.rows = lengths.pop()
        self.shuffle = shuffle
        self.seed = seed
        self.batch_rows = batch_size
        self.num_batches = -(-self.rows // batch_size)
        self._class_weight: Mapping[int, float] | None = None
        self._weighted = self._arrays
        """The arrays with the class weights of the present `fit`."""
        self._mine: list[Indices] = []
        self._in_tensorflow: Any = None
        """The `tf.data.Dataset` of the batches in `_mine`; made once, which takes longer than entering `fit`."""
        self._trained_next()

    def __len__(self) -> int:
        return self.num_batches

    def _trained_next(self) -> None:
        """Make this the dataset whose rows the state's next steps train."""
        session = self.state._steps.fit
        session.batches_in_advance = self._in_advance
        session.global_batch = self.batch_rows

    def _dealt(self, epoch: int, batches: range) -> list[Indices]:
        position = process.require()
        order = EpochOrder(self.rows, self.seed, epoch, self.shuffle)
        return deal(order, batches, self.num_batches, position.rank, position.size)

    def _in_advance(self, count: int) -> Any:
        """Return an iterator over the first batches of the training data, to trace a step with or to run it."""
        self._mine = self._dealt(0, range(count))
        return iter(self._dataset())

    def _dataset(self) -> Any:
        import tensorflow as tf

        if self._in_tensorflow is None:

            def spec_of(array: npt.NDArray[Any]) -> Any:
                return tf.TensorSpec([None, *array.shape[1:]], array.dtype)

            specs = keras.tree.map_structure(spec_of, self._weighted)
            batches = tf.data.Dataset.from_generator(self.get_numpy_iterator, output_signature=specs)
            # Autotuning has a thread that sleeps 10 ms, then 20 ms, and so on up to a minute. An iterator that is given
            # up waits for the end of that sleep. The thread may also read ahead in a world that is over.
            options = tf.data.Options()
            options.autotune.enabled = False
            self._in_tensorflow = batches.prefetch(2).with_options(options)
        return self._in_tensorflow

    def _weigh(self, class_weight: Mapping[int, float] | None) -> None:
        if class_weight != self._class_weight:
            self._weighted = _with_class_weight(self._arrays, class_weight) if class_weight else self._arrays
            self._class_weight = dict(class_weight) if class_weight else None
            self._in_tensorflow = None

    # --- called by Keras ------------------------------------------------------------------------

    def on_epoch_begin(self) -> None:
        self._trained_next()
        left = range(min(self.state.batch, self.num_batches), self.num_batches)
        self._mine = self._dealt(self.state.epoch, left)
        self.state._steps.fit.nothing_left = not self._mine
        # Keras asks for the number of batches once, and a resumed epoch has fewer; the caller is the iterator that
        # counts them
        counting = calling_object(lambda caller: hasattr(caller, "_num_batches"), within=1)
        if counting is not None:
            steps = counting.steps_per_epoch
            if steps not in (None, self.num_batches):
                raise UsageError(
                    f"steps_per_epoch={steps} (of model.fit, or of KERAS_MAX_STEPS_PER_EPOCH), but an epoch of this "
                    f"ElasticDataset has {self.num_batches} batches, and ends with the last of them. Leave it out; for "
                    "shorter epochs, give the dataset fewer rows"
                )
            counting.steps_per_epoch = None  # or Keras counts that many in a resumed epoch, which has fewer
            counting._num_batches = len(self._mine)
            if not self._mine:  # the epoch was left after its last batch; nothing is wrong with the data
                counting._interrupted_warning = lambda: None

    def get_tf_dataset(self) -> Any:
        self._weigh(_check_arguments(self))
        return self._dataset()

    def get_torch_dataloader(self) -> Any:
        import torch

        self._weigh(_check_arguments(self))
        return (keras.tree.map_structure(torch.from_numpy, batch) for batch in self.get_numpy_iterator())

    def get_numpy_iterator(self) -> Iterator[Any]:
        for rows in self._mine:
            yield keras.tree.map_structure(lambda array, rows=rows: array[rows], self._weighted)


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


# --- the arguments of `model.fit` beside an ElasticDataset, which Keras does not pass on to it ---------


def _check_arguments(dataset: Any) -> Mapping[int, float] | None:
    """Return `class_weight` of the `fit` that asks for batches; UsageError for other uses and arguments."""
    entry, given = calling_method(lambda owner: isinstance(owner, keras.Model), _ENTRIES, _WITHIN)
    if not entry:
        return None
    validation = given.get("validation_data")
    beside = validation if isinstance(validation, (tuple, list)) else (validation,)
    kind = type(dataset)
    trained: bool = entry == "fit" and given.get("x") is dataset
    if not trained or any(isinstance(part, kind) for part in beside):
        where = f"model.{entry}" if entry != "fit" else "validation_data of model.fit"
        raise UsageError(
            f"an ElasticDataset cannot be used in {where}: it deals each worker its share of the rows that are left "
            "of the state's epoch of training. Give the arrays, (x, y), or a tf.data.Dataset of them"
        )
    for name in ("y", "sample_weight"):
        if given.get(name) is not None:
            raise UsageError(
                f"model.fit got {name}= beside an ElasticDataset, where Keras ignores it; give it to the dataset: "
                "ElasticDataset(x, y, sample_weight, state=state, ...)"
            )
    size = given.get("batch_size")
    if size is not None and size != dataset.batch_rows:
        raise UsageError(
            f"model.fit got batch_size={size} beside an ElasticDataset whose batch_size is {dataset.batch_rows}; give "
            "it to the dataset alone, and validation_batch_size to fit for the rows of validation_data"
        )
    shuffle = given.get("shuffle", True)
    if shuffle is not True and (shuffle or dataset.shuffle):  # True is the default of `fit`
        raise UsageError(
            f"model.fit got shuffle={shuffle!r} beside an ElasticDataset with shuffle={dataset.shuffle}, where Keras "
            "ignores it; give it to the dataset: ElasticDataset(..., shuffle=False) keeps the order of the rows"
        )
    weights: Mapping[int, float] | None = given.get("class_weight")
    return weights or None


def _with_class_weight(parts: tuple[Any, ...], class_weight: Mapping[int, float]) -> tuple[Any, ...]:
    """Return (x, y, weights) with the weights of the rows' classes; raise UsageError without targets of one output."""
    if len(parts) < 2 or not isinstance(parts[1], np.ndarray):
        raise UsageError(
            "class_weight needs the targets of one output as y of the ElasticDataset; for a model with several "
            "outputs, give ElasticDataset a sample_weight for each"
        )
    weights = np.asarray(class_weight_to_sample_weights(parts[1], class_weight))
    if len(parts) > 2:
        own = parts[2]
        weights = (own * weights.reshape(-1, *[1] * (own.ndim - 1))).astype(weights.dtype)
    return parts[0], parts[1], weights

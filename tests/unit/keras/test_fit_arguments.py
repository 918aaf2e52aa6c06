"""The arguments of `model.fit` beside an `ElasticDataset`: each does what it does with arrays, or is refused."""

import keras
import numpy as np
import pytest

import spark_elastic.keras as hvd
from spark_elastic.data.order.permutation import EpochOrder
from spark_elastic.errors import HostsUpdatedInterrupt, UsageError
from spark_elastic.keras.elastic import ElasticCallback, ElasticDataset, KerasState
from spark_elastic.keras.elastic.fit import deal
from tests.unit.world_link import die, link
from tests.unit.worlds import together

ROWS, BATCH, FEATURES, CLASSES = 30, 10, 4, 3
WEIGHTS = {0: 3.0, 2: 0.25}


def data(one_hot=False):
    generator = np.random.default_rng(5)
    x = generator.normal(size=(ROWS, FEATURES)).astype("float32")
    y = generator.integers(0, CLASSES, ROWS)
    return x, np.eye(CLASSES, dtype="float32")[y] if one_hot else y


def build(one_hot=False, distributed=True):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    kind = keras.losses.CategoricalCrossentropy if one_hot else keras.losses.SparseCategoricalCrossentropy
    optimizer = keras.optimizers.SGD(0.1)
    loss = kind(from_logits=True)
    model.compile(
        hvd.DistributedOptimizer(optimizer) if distributed else optimizer, loss, weighted_metrics=["accuracy"]
    )
    return model


def ready():
    """Return a model, its state, and a dataset of that."""
    model = build()
    state = KerasState(model, batch=0, epoch=0)
    return model, state, ElasticDataset(*data(), state=state, batch_size=BATCH)


def elastic(row_weights=None, one_hot=False, shuffled=False, **arguments):
    """Fit an ElasticDataset in an elastic loop; return the History and the sum of each trained variable."""
    model = build(one_hot)
    state = KerasState(model, batch=0, epoch=0)
    dataset = ElasticDataset(*data(one_hot), row_weights, state=state, batch_size=BATCH, shuffle=shuffled)

    @hvd.elastic.run
    def loop(state):
        callbacks = [ElasticCallback(state)]
        return model.fit(dataset, epochs=2, initial_epoch=state.epoch, callbacks=callbacks, verbose=0, **arguments)

    return loop(state), weights_of(model)


def weights_of(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]


def plain(sample_weight=None, one_hot=False, **arguments):
    model = build(one_hot, distributed=False)
    x, y = data(one_hot)
    history = model.fit(
        x, y, batch_size=BATCH, shuffle=False, epochs=2, sample_weight=sample_weight, verbose=0, **arguments
    )
    return history, weights_of(model)


def same(one, other):
    for name, values in other[0].history.items():
        assert one[0].history[name] == pytest.approx(values, rel=1e-5), name
    for mine, theirs in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_lists_of_arrays_are_trained_as_by_fit(alone):
    def build_two():
        keras.utils.set_random_seed(1)
        first, second = keras.Input((FEATURES,)), keras.Input((1,))
        joined = keras.layers.Dense(1)(keras.layers.concatenate([first, second]))
        model = keras.Model([first, second], [joined, keras.layers.Dense(1)(first)])
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
        return model

    x, y = data()
    inputs, targets = [x, x[:, :1] + 1], [y[:, None], y[:, None] - 1]
    other, model = build_two(), build_two()
    history = other.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0).history
    state = KerasState(model, batch=0, epoch=0)
    dataset = ElasticDataset(inputs, targets, state=state, batch_size=BATCH, shuffle=False)
    assert model.fit(dataset, verbose=0).history["loss"] == pytest.approx(history["loss"], rel=1e-5)


@pytest.mark.parametrize("one_hot", [False, True])
def test_class_weight_weighs_as_with_arrays(alone, one_hot):
    weighted = plain(one_hot=one_hot, class_weight=WEIGHTS)
    same(elastic(one_hot=one_hot, class_weight=WEIGHTS), weighted)
    assert np.abs(weighted[1][0] - plain(one_hot=one_hot)[1][0]).max() > 0.01


@pytest.mark.nightly
def test_class_weight_multiplies_the_sample_weights(alone):
    own = np.linspace(0.5, 2.0, ROWS, dtype="float32")
    of_classes = np.array([WEIGHTS.get(int(label), 1.0) for label in data()[1]], "float32")
    same(elastic(own, class_weight=WEIGHTS), plain(own * of_classes))


@pytest.mark.nightly
def test_class_weight_of_one_fit_is_not_that_of_the_next(alone):
    model = build()
    state = KerasState(model, batch=0, epoch=0)
    dataset = ElasticDataset(*data(), state=state, batch_size=BATCH, shuffle=False)
    other = build(distributed=False)
    for weights in (WEIGHTS, None, {1: 5.0}):
        more = {"epochs": state.epoch + 1, "initial_epoch": state.epoch, "class_weight": weights, "verbose": 0}
        model.fit(dataset, callbacks=[ElasticCallback(state)], **more)
        other.fit(*data(), batch_size=BATCH, shuffle=False, class_weight=weights, verbose=0)
        np.testing.assert_allclose(weights_of(model)[0], weights_of(other)[0], rtol=1e-5, atol=1e-6)


def test_weights_need_the_targets_of_one_output(alone):
    model = build()
    state = KerasState(model, batch=0, epoch=0)
    x, y = data()
    for dataset in (ElasticDataset(x, state=state), ElasticDataset(x, {"one": y, "other": y}, state=state)):
        with pytest.raises(UsageError, match="targets of one output"):
            model.fit(dataset, class_weight=WEIGHTS, verbose=0)
    with pytest.raises(UsageError, match="without y"):
        ElasticDataset(x, sample_weight=np.ones(ROWS), state=state)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"y": data()[1]}, "got y= "),
        ({"sample_weight": np.ones(ROWS)}, "got sample_weight= "),
        ({"batch_size": 7}, "batch_size=7 .* batch_size is 10"),
        ({"shuffle": False}, "shuffle=False .* shuffle=True"),
        ({"shuffle": "batch"}, "shuffle='batch'"),
        ({"steps_per_epoch": 2}, "steps_per_epoch=2 .* has 3 batches"),
    ],
)
def test_argument_that_keras_would_ignore_is_refused(alone, arguments, names):
    with pytest.raises(UsageError, match=names):
        elastic(shuffled=True, **arguments)


@pytest.mark.nightly
def test_arguments_that_say_what_the_dataset_says_are_accepted(alone):
    same(elastic(batch_size=BATCH, shuffle=False, steps_per_epoch=ROWS // BATCH), plain())


def test_validation_has_its_epochs_after_a_resume_too(alone):
    """`validation_freq` counts the epochs of the state, because of `initial_epoch=state.epoch`."""
    model, state, dataset = ready()
    validated, steps, counted = [], [], []

    class Notes(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            validated.append(state.epoch)

        def on_train_batch_end(self, batch, logs=None):
            steps.append((state.epoch, state.batch))
            if len(steps) == 8:  # in the middle of the third epoch
                raise HostsUpdatedInterrupt

        def on_epoch_end(self, epoch, logs=None):
            counted.append(float(model.metrics[0].count))

    @hvd.elastic.run
    def loop(state):
        model.fit(
            dataset,
            epochs=6,
            initial_epoch=state.epoch,
            steps_per_epoch=ROWS // BATCH,
            validation_data=data(),
            validation_freq=2,
            callbacks=[ElasticCallback(state), Notes()],
            verbose=0,
        )

    loop(state)
    assert validated == [1, 3, 5]
    assert counted[2] == ROWS, "the metrics of the epoch that was left are those of all its rows"
    assert steps == [(epoch, batch) for epoch in range(6) for batch in (1, 2, 3)]


@pytest.mark.parametrize(
    ("arguments", "until"),
    [(lambda epoch: {"epochs": 3, "initial_epoch": epoch}, 3), (lambda epoch: {"epochs": 3}, 4)],
    ids=["initial_epoch", "neither"],
)
def test_fit_that_would_train_more_epochs_after_a_change_of_the_world_warns(alone, arguments, until, caplog):
    model, state, dataset = ready()
    left = []

    class Leaves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if not left and (state.epoch, state.batch) == (1, 2):
                left.append(True)
                raise HostsUpdatedInterrupt

    @hvd.elastic.run
    def loop(state):
        model.fit(dataset, callbacks=[ElasticCallback(state), Leaves()], verbose=0, **arguments(state.epoch))

    loop(state)
    assert state.epoch == until
    assert ("now trains until epoch 4; before, it was until epoch 3" in caplog.text) == (until == 4)
    caplog.clear()
    more = {"epochs": until + 2, "initial_epoch": until}
    model.fit(dataset, callbacks=[ElasticCallback(state)], verbose=0, **more)  # another fit may train longer
    assert "now trains until" not in caplog.text


# --- several datasets of one state ----------------------------------------------------------------------


@pytest.mark.parametrize("beside", ["dataset", "tuple"])
def test_elastic_dataset_is_refused_as_other_data_than_that_of_fit(alone, beside):
    """Its rows would be dealt as those of the state's epoch that are left: none, behind the last batch."""
    model = build()
    state = KerasState(model, batch=0, epoch=0)
    train = ElasticDataset(*data(), state=state, batch_size=BATCH)
    validate = ElasticDataset(*data(), state=state, batch_size=BATCH)
    before = weights_of(model)
    with pytest.raises(UsageError, match=r"validation_data .* \(x, y\), or a tf.data.Dataset"):
        model.fit(
            train,
            validation_data=validate if beside == "dataset" else (validate, None),
            callbacks=[ElasticCallback(state)],
            verbose=0,
        )
    np.testing.assert_array_equal(before[0], weights_of(model)[0])
    with pytest.raises(UsageError, match="validation_data"):
        model.fit(*data(), validation_data=validate, verbose=0)
    with pytest.raises(UsageError, match=r"model\.evaluate"):
        model.evaluate(validate, verbose=0)
    with pytest.raises(UsageError, match=r"model\.predict"):
        model.predict(validate, verbose=0)


def test_validation_on_other_data_leaves_the_progress_alone(alone):
    import tensorflow as tf

    model, state, dataset = ready()
    x, y = (part[:7] for part in data())
    given = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    history = model.fit(dataset, epochs=2, validation_data=given, callbacks=[ElasticCallback(state)], verbose=0)
    assert (state.epoch, state.batch) == (2, 0)
    assert history.history["val_loss"][-1] == pytest.approx(model.evaluate(x, y, verbose=0)[0], rel=1e-5)


FEW, MANY = 12, 20  # rows of the two datasets, in batches of 4


class Seen(keras.layers.Layer):
    """Counts how often each row, which the first column numbers, is trained by this worker."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(FEW + MANY,), initializer="zeros", trainable=False, name="rows")

    def call(self, inputs, training=False):
        if training:
            numbers = keras.ops.cast(inputs[:, 0], "int32")
            self.rows.assign(self.rows + keras.ops.sum(keras.ops.one_hot(numbers, FEW + MANY), axis=0))
        return inputs / (FEW + MANY)


def train_two_phases(dies):
    """Train one dataset for two epochs, then another one for two; a worker in `dies` ends at that step of the state."""
    hvd.init()
    keras.utils.set_random_seed(1)
    seen = Seen()
    model = keras.Sequential([keras.layers.Input((1,)), seen, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    state = KerasState(model, batch=0, epoch=0)
    numbers = np.arange(FEW + MANY, dtype="float32").reshape(-1, 1)
    few = ElasticDataset(numbers[:FEW], numbers[:FEW], state=state, batch_size=4)
    many = ElasticDataset(numbers[FEW:], numbers[FEW:], state=state, batch_size=4)

    class Dies(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if dies.get(link().worker) == (state.epoch, state.batch):
                die()

    @hvd.elastic.run
    def loop(state):
        for dataset, epochs in ((few, 2), (many, 4)):
            callbacks = [ElasticCallback(state), Dies()]
            model.fit(dataset, initial_epoch=state.epoch, epochs=epochs, callbacks=callbacks, verbose=0)

    loop(state)
    rows = hvd.allreduce(keras.ops.convert_to_tensor(seen.rows), op=hvd.Sum)
    return [round(float(value)) for value in keras.ops.convert_to_numpy(rows)], weights_of(model), state.progress


@pytest.mark.nightly
def test_two_datasets_that_are_trained_one_after_the_other_keep_their_rows():
    quiet = together(train_two_phases, {}, count=3)
    assert quiet[0][0] == [2] * (FEW + MANY)
    (survivor,) = together(train_two_phases, {1: (1, 2), 2: (3, 1)}, count=3, left=1)
    assert survivor[2] == quiet[0][2] == 2 * (FEW + MANY) // 4
    np.testing.assert_allclose(survivor[1][0], quiet[0][1][0], rtol=1e-4)


# --- which rows a member takes, and their tensors -----------------------------------------------------


@pytest.mark.parametrize(("rows", "batches", "size"), [(90, 10, 3), (7, 7, 3), (11, 3, 5), (64, 1, 1), (5, 2, 4)])
def test_members_share_each_batch_and_each_has_a_row(rows, batches, size):
    order = EpochOrder(rows, 3, 1)
    whole = order[np.arange(rows)]
    members = [deal(order, range(batches), batches, rank, size) for rank in range(size)]
    for number in range(batches):
        part = whole[number * rows // batches : (number + 1) * rows // batches].tolist()
        taken = [shares[number].tolist() for shares in members]
        assert all(taken)
        assert {row for each in taken for row in each} == set(part)
        if len(part) >= size:
            assert sorted(row for each in taken for row in each) == sorted(part)
            assert taken == [part[rank::size] for rank in range(size)]

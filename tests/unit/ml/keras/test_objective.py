"""Losses of batches in parts: the loss and the gradient are those of plain Keras on the whole batch."""

import contextlib
from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import LossFunctionWrapper

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.keras.dry_run import dry_run
from spark_elastic.ml.keras.engine import prepare
from spark_elastic.ml.keras.objective import ScaledLoss, Shares
from spark_elastic.ml.keras.steps import part_arguments
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import dense, in_float64, make_training

ROWS, LONGEST, WORDS, KINDS = 13, 5, 7, 3
ops = keras.ops


losses = keras.losses
NAMES = (
    *("mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_logarithmic_error"),
    *("huber", "log_cosh", "poisson", "kl_divergence", "cosine_similarity", "hinge", "squared_hinge"),
    *("categorical_hinge", "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy"),
    *("categorical_focal_crossentropy", "mse", "KLD"),
)
REDUCTIONS = ("sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", None)


def of_numbers():
    """Losses for a label of numbers for each token."""
    return [*NAMES, *(losses.MeanSquaredError(reduction=each) for each in REDUCTIONS)]


def of_classes():
    """Losses for a class number for each token."""
    return [
        "sparse_categorical_crossentropy",
        *(losses.SparseCategoricalCrossentropy(ignore_class=1, reduction=each) for each in REDUCTIONS),
    ]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    generator = np.random.default_rng(3)
    words = generator.integers(1, WORDS, (ROWS, LONGEST)) * (
        np.arange(LONGEST) < generator.integers(1, LONGEST + 1, (ROWS, 1))
    )
    words[0] = 0  # a row of which nothing is left
    rows = {"features_0": words, "number": generator.uniform(0.1, 1.0, (ROWS, LONGEST, KINDS)), "class": words % KINDS}
    rows["weight"] = generator.uniform(0.0, 2.0, ROWS) * (np.arange(ROWS) % 4 > 0)
    return rows, tmp_path_factory.mktemp("tokens")


def divided(ready, columns, edges):
    """Return the loss and the gradients of a batch that is divided at `edges`, as the workers compute them."""
    arrays = [
        columns[name].astype(spec.dtype.as_numpy_dtype)
        for name, spec in zip(ready.feeder.names, ready.feeder.specs, strict=True)
    ]
    parts = [tuple(tf.constant(each[start:stop]) for each in arrays) for start, stop in pairwise(edges)]
    totals = ready.graphs.totals(parts, lambda own: own)
    ready.metrics.reset()
    made = [ready.graphs._part(*part_arguments(part, edges[-1], totals))[0] for part in parts]
    gradients = [sum(tf.convert_to_tensor(part[at]).numpy() for part in made) for at in range(len(made[0]))]
    return ready.metrics.logs(np.append(ready.metrics.read().numpy(), float(edges[-1]))), gradients


EDGES = [0, 1, 4, ROWS]
"""A part of one row, of which a mask leaves nothing, and two uneven ones."""


@pytest.mark.parametrize("weighted", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("by_class", [False, True], ids=["numbers", "classes"])
def test_parts_of_any_loss_add_up_to_the_loss_and_gradient_of_the_whole(by_class, masked, weighted, tokens):
    rows, _ = tokens
    labels, mask = rows["class" if by_class else "number"], rows["features_0"] != 0
    outputs = np.random.default_rng(1).dirichlet(np.ones(KINDS), (ROWS, LONGEST))

    def of(loss, first, last, weights):
        with tf.GradientTape() as tape:
            output = tf.constant(outputs[first:last])
            tape.watch(output)
            seen = tf.identity(output)
            if masked:
                seen._keras_mask = tf.constant(mask[first:last])
            value = loss(tf.constant(labels[first:last], "float64"), seen, weights)
        return float(tf.reduce_mean(value)), tape.gradient(value, output).numpy()

    with in_float64():
        for given in of_classes() if by_class else of_numbers():
            shares, by_row = Shares(), rows["weight"] if weighted else None
            term = ScaledLoss(given, shares)
            by_token = None if by_row is None else np.repeat(by_row[:, None], LONGEST, 1)
            expected = of(keras.losses.get(given) if not isinstance(given, str) else as_loss(given), 0, ROWS, by_token)
            totals = [0.0]
            for first, last in pairwise(EDGES):
                of(term, first, last, None if by_row is None else by_row[first:last])
                totals = [totals[0] + float(shares.counts.get(0, 0.0))]
            loss, gradients = 0.0, []
            for first, last in pairwise(EDGES):
                share = (last - first) / ROWS
                with shares.for_part(tf.constant([last - first, share, *totals], tf.float64)):
                    value, gradient = of(term, first, last, None if by_row is None else by_row[first:last])
                loss += value * share
                gradients.append(gradient * share)
            assert loss == pytest.approx(expected[0], rel=1e-9), given
            np.testing.assert_allclose(np.concatenate(gradients), expected[1], rtol=1e-8, atol=1e-12, err_msg=given)


def as_loss(name):
    return LossFunctionWrapper(keras.losses.get(name), name=name)


# --- losses of one's own, in the trial step -----------------------------------------------------------


def by_row(y_true, y_pred):
    return ops.square(y_true - y_pred)


def mean(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def total(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


def root(y_true, y_pred):
    return ops.sqrt(mean(y_true, y_pred))


def fraction(y_true, y_pred):
    """A mean over the rows with labels above 0."""
    kept = ops.cast(y_true > 0, y_pred.dtype)
    return kept * ops.abs(y_true - y_pred), kept


def of_sums(y_true, y_pred):
    return tuple(map(ops.sum, fraction(y_true, y_pred)))


def two_means(y_true, y_pred):
    return mean(y_true, y_pred), ops.mean(ops.cast(y_true > -9, y_pred.dtype))


def all_but_one(y_true, y_pred):
    """A mean over the rows with labels below 9, as a number."""
    kept = ops.cast(y_true < 9, y_pred.dtype)
    return ops.sum(kept * ops.square(y_true - y_pred)) / ops.sum(kept)


def scalar_fraction(y_true, y_pred):
    one, other = of_sums(y_true, y_pred)
    return one / other


class Pairs(keras.losses.Loss):
    """Compares each output [rows, 1] with all labels [rows]."""

    def call(self, y_true, y_pred):
        return ops.square(y_true - y_pred)


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return total(y_true, y_pred[:, 0]) if self.reduction == "sum" else mean(y_true, y_pred[:, 0])


@keras.saving.register_keras_serializable("test_objective")
class Adds(keras.layers.Layer):
    """A layer that adds a loss: a sum over its rows, or their mean, perhaps with noise."""

    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind, self.seeds = kind, keras.random.SeedGenerator(1)

    def call(self, x):
        noise = keras.random.normal(ops.shape(x), seed=self.seeds, dtype=x.dtype) if "noise" in self.kind else 0.0
        self.add_loss((ops.sum if "sum" in self.kind else ops.mean)(ops.square(x + 0.1 * noise)))
        return x

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    generator = np.random.default_rng(5)
    rows = {"features_0": generator.normal(size=(23, 4)), "label_0": generator.normal(size=23)}
    folder = tmp_path_factory.mktemp("numbers")
    pack(rows, folder / "plain")
    rare = {"features_0": generator.normal(size=(90, 4)), "label_0": np.where(np.arange(90) == 71, 9.0, 1.0)}
    pack(rare, folder / "rare")
    pack({**rows, "sample_weight": generator.uniform(size=23)}, folder / "weighted")
    squares = np.array([1, 3, 2, 1, 3] + [1, 3] * 5 + [2])  # 2 on average, in the first 5 rows and in the other 11 too
    pack({"features_0": np.zeros((16, 4)), "label_0": np.sqrt(squares)}, folder / "even")
    return folder


def try_loss(folder, tmp_path, loss, adding, rows="plain", **changes):
    with in_float64():
        net = keras.Sequential([keras.Input((4,)), *([Adds(adding)] if adding else []), dense(1, 1)])
        dry_run(make_training(folder, tmp_path, rows=rows, model=net, loss=loss, **{"metrics": [], **changes}), None)


@pytest.mark.parametrize(
    ("loss", "layer", "rows"),
    [
        *(
            (loss, None, "plain")
            for loss in (by_row, mean, fraction, of_sums, "mse", OwnCall(), OwnCall(reduction="sum"))
        ),
        *((loss, None, "weighted") for loss in (by_row, fraction, losses.MeanSquaredError(reduction="sum"))),
        ("mse", "mean, noise", "plain"),
    ],
)
def test_mean_by_row_or_fraction_passes_the_trial_step(loss, layer, rows, numbers, tmp_path):
    try_loss(numbers, tmp_path, loss, layer, rows=rows)


@pytest.mark.parametrize(
    ("loss", "layer", "rows", "said"),
    [
        (total, None, "plain", "the loss total is not a mean over rows"),
        (root, None, "even", "the loss root is not a mean over rows: .* divided into 16 parts"),
        (scalar_fraction, None, "plain", r"Return a value for each row .*loss_is_per_worker"),
        (all_but_one, None, "rare", "the loss all_but_one is not a mean over rows: .* for the first 90 rows"),
        (Pairs(), None, "plain", r"label_0 is \['rows'\] and the output \['rows', 1\]: .* compares them in all pairs"),
        (losses.Dice(), None, "plain", "the loss dice is not a mean"),
        ("mse", "sum, noise", "plain", "the loss added by adds.* is not a mean"),
        (mean, None, "weighted", "the loss mean returns one number for all rows, which sample weights cannot"),
        (of_sums, None, "weighted", "the loss of_sums returns one number for all rows"),
    ],
)
def test_loss_that_is_no_mean_over_rows_is_refused_unless_declared(loss, layer, rows, said, numbers, tmp_path):
    with pytest.raises(InvalidSettingsError, match=said):
        try_loss(numbers, tmp_path, loss, layer, rows=rows)
    try_loss(numbers, tmp_path, loss, layer, rows=rows, loss_is_per_worker=True)


def test_mean_beside_the_loss_is_not_taken_for_a_denominator(numbers, tmp_path):
    said = r"two_means returned two values, .* it is 1 for the first 16 rows together, and 16 in all .*\(numerator, den"
    with pytest.raises(InvalidSettingsError, match=said):
        try_loss(numbers, tmp_path, two_means, None, rows="even", loss_is_per_worker=True)


# --- metrics, and losses with a state -----------------------------------------------------------------


def test_fraction_of_parts_is_that_of_the_whole_batch(numbers, tmp_path):
    with in_float64():
        net = keras.Sequential([keras.Input((4,)), dense(1, 1)])
        ready = prepare(make_training(numbers, tmp_path, model=net, loss=of_sums, metrics=[]))
    columns = Dataset.open(numbers / "plain").reader("train", batch_size=23, shuffle=False)
    rows = next(iter(columns.epoch(0))).tensors
    expected = divided(ready, rows, [0, 23])
    logs, gradients = divided(ready, rows, [0, 2, 9, 23])
    one, other = of_sums(rows["label_0"], net(rows["features_0"])[:, 0])
    assert logs["loss"] == pytest.approx(float(one / other), rel=1e-6)
    assert logs == pytest.approx(expected[0], rel=1e-9)
    for gradient, wanted in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-9)


def absolute(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred))


def absolute_by_row(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


def squeezed(y_true, y_pred):
    return absolute(y_true, ops.squeeze(y_pred, 1))


def bias(y_true, y_pred):
    return ops.mean(y_true) - ops.mean(y_pred)


@pytest.mark.parametrize(
    ("metric", "refused"), [(absolute, True), (absolute_by_row, True), (squeezed, False), (bias, False), ("mae", False)]
)
def test_metric_that_compares_all_pairs_of_rows_is_refused(metric, refused, numbers, tmp_path):
    said = r"labels \[4\] and outputs \[4, 1\] in all pairs"
    with pytest.raises(DataError, match=said) if refused else contextlib.nullcontext():
        try_loss(numbers, tmp_path, "mse", None, metrics=[metric])


class Stateful(keras.losses.Loss):
    """A loss with a state in Python, and one in a variable: both count its calls."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls, self.steps = 0, keras.Variable(0.0, trainable=False)

    def call(self, y_true, y_pred):
        self.calls += 1
        self.steps.assign_add(1.0)
        return ops.square(y_true - y_pred[:, 0]) * self.calls * ops.cast(self.steps.value, y_pred.dtype)


def test_loss_with_a_state_is_called_as_often_as_by_keras(numbers, tmp_path):
    with in_float64():
        net, plain = (keras.Sequential([keras.Input((4,)), dense(1, 1)]) for _ in range(2))
        plain.compile("sgd", loss=Stateful())
    rows = next(iter(Dataset.open(numbers / "plain").reader("train", batch_size=23, shuffle=False).epoch(0))).tensors
    settings = {"model": net, "loss": Stateful(), "optimizer": "sgd", "metrics": [], "epochs": 3, "batch_size": 23}
    training = make_training(numbers, tmp_path, shuffle=False, **settings)
    dry_run(training, None)
    losses_of_epochs = [row["loss"] for row in trainings.alone(training)["history"]]
    with in_float64():
        fitted = plain.fit(rows["features_0"], rows["label_0"], batch_size=23, epochs=3, shuffle=False, verbose=0)
    assert losses_of_epochs == pytest.approx(fitted.history["loss"], rel=1e-6)

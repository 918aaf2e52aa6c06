"""The dry run on the driver: errors before any worker starts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from spark_elastic.data.dataset import pack
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.keras.dry_run import dry_run
from tests.unit.ml.keras import trainings
from tests.unit.ml.keras.trainings import dense, make_training


def try_training(data, tmp_path, inference_fn=None, **changes):
    return dry_run(make_training(data, tmp_path, **changes), inference_fn)


@pytest.mark.parametrize("variant", ["two outputs", "divided by sample weights", "a train_step of one's own"])
def test_valid_training_passes_and_its_outputs_are_known(variant, data, tmp_path):
    found = try_training(data, tmp_path, **trainings.variant_of(variant))
    shapes = [output.shape for output in found.outputs]
    assert shapes == ([(3,), (1,)] if variant == "two outputs" else [(3,)])
    assert (found.rule, found.why_not) == ("argmax", "")


def test_the_rule_is_that_of_the_first_output_if_it_has_a_loss(data, tmp_path):
    x = keras.Input((6,))
    net = keras.Model(x, [dense(1, 1, name="size")(x), dense(3, 2, name="kind")(x)])
    found = try_training(data, tmp_path, model=net, loss={"kind": trainings.cross_entropy()}, metrics=None)
    assert found.rule is None
    net = keras.Sequential([keras.Input((6,)), dense(1, 1)])
    found = try_training(data, tmp_path, model=net, loss="mse", metrics=[])
    assert found.rule == "value"


@pytest.mark.parametrize(("nothing_by_row", "taken"), [(lambda y: keras.ops.mean(y), (0,)), (lambda y: y * 2, ())])
def test_outputs_without_a_value_for_each_row_are_left_out_of_transform(nothing_by_row, taken, data, tmp_path):
    x = keras.Input((6,))
    y = dense(3, 2, name="kind")(x)
    net = keras.Model(x, [y, nothing_by_row(y)])
    found = try_training(data, tmp_path, model=net, loss=[trainings.cross_entropy(), None], metrics=None)
    assert (found.output_positions, found.outputs[0].shape, found.rule) == (taken, (3,), "argmax")


class Alone(keras.Sequential):
    """A train_step with a loss of its own, and no test_step."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(data[0], training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_model_with_a_train_step_and_no_other_loss_passes(tmp_path):
    pack({"features_0": np.ones((8, 6), np.float32)}, tmp_path / "rows" / "plain")
    net = Alone([keras.Input((6,)), dense(3, 2)])
    found = try_training(tmp_path / "rows", tmp_path / "run", model=net, loss=None, metrics=None)
    assert [output.shape for output in found.outputs] == [(3,)]


class Most(keras.metrics.Metric):
    """A maximum, whose variable Keras takes for a sum."""

    def __init__(self, name="most", **options):
        super().__init__(name=name, **options)
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.cast(keras.ops.max(y_pred), self.dtype) + 5))

    def result(self):
        return self.most.value


class Odd(Callback):
    def state_dict(self):
        return {"x": object()}


def small(columns):
    return {**columns, "features_0": columns["features_0"][:, :5]}


def needs_python(y_true, y_pred):
    return tf.reduce_mean(y_pred.numpy())


OTHER = {"metrics": []}


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"transformation_fn": small}, DataError, r"(?s)expected .*6.*The tensors were: .*features_0 float64 \[4, 6\]"),
        ({"loss": "categorical_crossentropy", **OTHER}, DataError, r"(?s)shape.*label_0 int64 \[4\]"),
        ({"loss": trainings.cross_entropy(), "metrics": [Most()]}, InvalidSettingsError, "metric .*most"),
        ({"metrics": [keras.metrics.SparseCategoricalAccuracy("lr")]}, InvalidSettingsError, "cannot be called 'lr'"),
        ({"callbacks": [keras.callbacks.EarlyStopping("val_f1")]}, InvalidSettingsError, "monitors 'val_f1', and"),
        ({"callbacks": [keras.callbacks.EarlyStopping("label_sum")]}, InvalidSettingsError, "mode='max'"),
        ({"callbacks": [Odd()]}, InvalidSettingsError, r"state_dict\(\) of Odd must return values that JSON can hold"),
        ({"loss": needs_python}, AttributeError, "numpy"),
    ],
)
def test_misfit_is_reported_with_names_types_and_shapes(changes, error, said, data, tmp_path):
    with pytest.raises(error, match=said):
        try_training(data, tmp_path, **changes)


def test_label_beyond_the_classes_is_reported_with_its_shape(tmp_path):
    pack({"features_0": np.zeros((4, 6)), "label_0": np.array([0, 1, 2, 7])}, tmp_path / "plain")
    with pytest.raises(DataError, match=r"(?s)label value.*7.*outside.*label_0 int64 \[4\]"):
        try_training(tmp_path, tmp_path / "run")


def test_nan_loss_of_the_first_rows_is_a_warning(tmp_path, caplog):
    pack({"features_0": np.full((4, 6), np.nan), "label_0": np.arange(4) % 3}, tmp_path / "plain")
    try_training(tmp_path, tmp_path / "run")
    assert "the loss of the first rows is NaN" in caplog.text


@keras.saving.register_keras_serializable("tests")
class Centred(keras.layers.Layer):
    """A layer that keeps a moving mean of its rows."""

    def build(self, shape):
        self.moving = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="moving")

    def call(self, x, training=False):
        if training:
            self.moving.assign(0.9 * self.moving + 0.1 * keras.ops.mean(x, axis=0))
        return x


@pytest.mark.parametrize("of_rows", [True, False])
def test_variables_that_follow_the_rows_are_warned_of(of_rows, data, tmp_path, caplog):
    own = [Centred(name="own")] if of_rows else []
    net = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), *own, dense(3, 2)])
    try_training(data, tmp_path, model=net)
    warned = [record.args[0] for record in caplog.records if record.msg.startswith("batch statistics")]
    assert warned == ["own/moving"] * of_rows


def by_row(y_true, y_pred):
    return keras.ops.max(y_pred, axis=-1)


def of_all_rows(y_true, y_pred):
    return keras.ops.mean(by_row(y_true, y_pred))


def test_metric_with_one_number_for_all_rows_is_warned_of_and_weighted_by_rows(data, tmp_path, caplog):
    metrics = ["accuracy", by_row, of_all_rows]
    try_training(data, tmp_path, metrics=metrics)
    assert "the metric of_all_rows returns one number for the rows" in caplog.text
    result = trainings.alone(make_training(data, tmp_path, metrics=metrics))
    for row in result["history"]:
        assert row["of_all_rows"] == pytest.approx(row["by_row"], rel=1e-9)
        assert row["val_of_all_rows"] == pytest.approx(row["val_by_row"], rel=1e-9)


def test_model_that_transform_cannot_call_has_a_reason(data, tmp_path, caplog):
    net = keras.Sequential([keras.Input((5,)), dense(3, 2)])
    found = try_training(data, tmp_path, model=net, transformation_fn=small)
    assert found.outputs == ()
    assert "transform does so through inference_fn" in found.why_not
    found = try_training(data, tmp_path, inference_fn=small, model=net, transformation_fn=small)
    assert [output.shape for output in found.outputs] == [(3,)]

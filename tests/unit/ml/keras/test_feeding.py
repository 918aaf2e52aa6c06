"""From a reader's batches to tensors: types, shapes, structures, and shared memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from spark_elastic.data.dataset import pack
from spark_elastic.errors import DataError
from spark_elastic.ml.keras.compiling import CompileArguments
from spark_elastic.ml.keras.feeding import BatchFeeder
from spark_elastic.ml.keras.model import KerasPredictor, _load_predictor
from spark_elastic.ml.keras.pickling import KerasPickle
from tests.unit.ml.keras.trainings import alone, make_net, make_training

ROWS = 7


def feeding(tmp_path, columns, model=None, loss=None, **changes):
    pack(columns, tmp_path / "plain")
    model = model or make_net()
    training = make_training(tmp_path, tmp_path / "run", model=model, **changes)
    return BatchFeeder(training, model, CompileArguments(optimizer=None, loss=loss)), training


def fed(feed, training, batch_size=4, **options):
    reader = training.dataset.reader("train", batch_size=batch_size, shuffle=False, **options)
    with reader:
        yield from map(feed.parts, reader.epoch(0))


def numbers(*shape, dtype=np.float32):
    return np.arange(np.prod((ROWS, *shape))).reshape(ROWS, *shape).astype(dtype)


def test_float64_columns_take_the_type_of_the_model(tmp_path):
    columns = {"features_0": numbers(6, dtype=np.float64), "label_0": numbers(dtype=np.float64)}
    feed, training = feeding(tmp_path, columns)
    assert [spec.dtype for spec in feed.specs] == [tf.float32, tf.float32]
    (first, *_) = fed(feed, training)
    assert first[0][0].dtype == tf.float32
    small = {"features_0": numbers(6, dtype=np.uint8), "label_0": numbers(dtype=np.int32)}
    assert [spec.dtype for spec in feeding(tmp_path / "1", small)[0].specs] == [tf.uint8, tf.int32], "as they are"
    double = keras.Sequential([keras.Input((6,), dtype="float64"), keras.layers.Dense(3, dtype="float64")])
    feed, _ = feeding(tmp_path / "2", columns, double)
    assert [spec.dtype for spec in feed.specs] == [tf.float64, tf.float64]


def test_transform_on_auto_without_a_gpu_and_with_too_little_memory():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    predictor = _load_predictor(KerasPickle.of(model), "auto", 1)
    given = {"features_0": numbers(3)}
    assert predictor(given)[0] == pytest.approx(model(given["features_0"]).numpy())

    def too_large(*tensors):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nwith a trace")

    predictor._traces = dict.fromkeys(predictor._traces, too_large)
    with pytest.raises(MemoryError, match=r"OOM when allocating tensor$"):
        predictor(given)


@pytest.mark.parametrize(("kind", "most"), [("float32", 2**24), ("int32", 2**31 - 1), ("int64", 2**62)])
def test_integers_that_the_models_input_would_change_are_refused(kind, most, tmp_path):
    model = keras.Sequential([keras.Input((1,), dtype=kind), keras.layers.Lambda(lambda x: x)])
    given = np.full((ROWS, 1), most)
    feed, training = feeding(tmp_path / "1", {"features_0": given, "label_0": numbers(dtype=np.int64)}, model)
    assert KerasPredictor(model)({"features_0": given})[0].astype(int).tolist() == given.tolist()
    assert len(list(fed(feed, training))) == 2
    if kind == "int64":
        return
    said = f"features_0 holds {most + 1}, and the model's input .* is of type {kind}.*dtype='int64'"
    feed, training = feeding(tmp_path / "2", {"features_0": given + 1, "label_0": numbers(dtype=np.int64)}, model)
    with pytest.raises(DataError, match=said):
        list(fed(feed, training))
    with pytest.raises(DataError, match=said):
        KerasPredictor(model)({"features_0": given + 1})


def test_inputs_are_a_tensor_a_list_or_a_dict_as_the_model_takes_them(tmp_path):
    columns = {"features_0": numbers(6), "features_1": numbers(4), "label_0": numbers(dtype=np.int64)}
    a, b = keras.Input((6,), name="b"), keras.Input((4,), name="a")
    output = keras.layers.Dense(3)(keras.layers.concatenate([a, b]))
    weights = {"sample_weight": np.ones(ROWS, np.float32)}
    feed, _ = feeding(tmp_path / "1", {**columns, **weights}, keras.Model([a, b], output))
    assert feed.structure(("x0", "x1", "y", "w")) == (["x0", "x1"], "y", "w")
    feed, _ = feeding(tmp_path / "2", columns, keras.Model({"b": a, "a": b}, output))
    assert feed.structure(("x0", "x1", "y")) == ({"a": "x0", "b": "x1"}, "y")
    feed, _ = feeding(tmp_path / "3", {"features_0": numbers(6)})
    assert feed.structure(("x0",)) == ("x0", "x0"), "an autoencoder is compared with its input"


def test_lists_of_any_length_need_a_transformation(tmp_path):
    columns = {"features_0": [np.arange(n, dtype=np.float32) for n in range(1, ROWS + 1)]}
    columns["label_0"] = numbers(dtype=np.int64) % 3
    with pytest.raises(DataError, match="features_0 holds list values of variable length"):
        feeding(tmp_path / "1", columns)
    net = keras.Sequential([keras.Input((None, 1)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)])
    feed, training = feeding(tmp_path / "2", columns, net, transformation_fn=padded)
    assert feed.specs[0].shape.as_list() == [None, None, 1]
    shapes = [one[0][0].shape.as_list() for one in fed(feed, training)]
    assert shapes == [[4, 4, 1], [3, 7, 1]], "an axis that is None in the model may be of any length"
    result = alone(make_training(tmp_path / "2", tmp_path / "run", model=net, transformation_fn=padded, epochs=1))
    assert result["history"][0]["rows"] == ROWS


def padded(columns):
    longest = max(map(len, columns["features_0"]))
    rows = [np.pad(row, (0, longest - len(row))) for row in columns["features_0"]]
    return {**columns, "features_0": np.stack(rows)[:, :, None].astype(np.float32)}


class Growing:
    def __init__(self):
        self.calls = 0

    def __call__(self, columns):
        self.calls += 1
        return {**columns, "features_0": columns["features_0"][:, : 7 - self.calls]}


def test_rows_with_another_shape_than_the_first_batch_are_refused(tmp_path):
    columns = {"features_0": numbers(6), "label_0": numbers(dtype=np.int64)}
    feed, training = feeding(tmp_path, columns, transformation_fn=Growing())
    with pytest.raises(
        DataError, match=r"features_0 is float32 \[5\] in this batch and was float32 \[6\] in the first"
    ):
        list(fed(feed, training))

"""`ElasticKerasModel` on a cluster: what `transform` adds, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import PipelineModel
from pyspark.ml.linalg import Vectors

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from spark_elastic import ElasticKerasEstimator, ElasticKerasModel, trusted_files  # noqa: E402
from spark_elastic.data.manifest import TensorField  # noqa: E402
from spark_elastic.errors import CheckpointError, InvalidSettingsError  # noqa: E402
from spark_elastic.ml.added_columns import OutputShape  # noqa: E402
from spark_elastic.ml.callbacks import EarlyStopping  # noqa: E402
from spark_elastic.ml.fitted import Fitted  # noqa: E402
from spark_elastic.reporting.history import History  # noqa: E402
from tests.integration.ml.layers import Doubled, Summed  # noqa: E402

JOINED = TensorField("features_0", ("a", "v"), "<f4", (3,))
NUMBER = OutputShape("<f4", ())


def model_of(model: Any, inputs: Any, *outputs: OutputShape, rule: str | None = None, **settings: Any) -> Any:
    made = ElasticKerasModel(**settings)
    event = {"seconds": 1.5, "kind": "finished", "text": "done"}
    made._attach(model, Fitted(tuple(inputs), outputs, rule, History([{"epoch": 0, "loss": 0.5}]), (event,)))
    return made


def net(*layers: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), *layers])


def two_inputs() -> Any:
    x, word = keras.Input((3,), name="x"), keras.Input((1,), dtype="int32", name="word")
    joined = keras.layers.Concatenate()([x, keras.layers.Flatten()(keras.layers.Embedding(5, 2)(word))])
    return keras.Model(
        {"x": x, "word": word}, [keras.layers.Dense(4, activation="softmax")(joined), keras.layers.Dense(1)(joined)]
    )


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    made = [(index, index / 10, Vectors.dense([1.0, index]), index % 5) for index in range(30)]
    return spark.createDataFrame(made, ["id", "a", "v", "word"]).repartition(3).cache()


@pytest.mark.nightly
def test_outputs_and_probabilities_are_what_the_model_gives(rows: Any) -> None:
    native = two_inputs()
    # The inputs of a dict are in the order of their names: word, x.
    inputs = [TensorField("features_0", ("word",), "<i8", ()), TensorField("features_1", ("a", "v"), "<f4", (3,))]
    model = model_of(native, inputs, OutputShape("<f4", (4,)), OutputShape("<f4", (1,)), rule="argmax_probability")
    made = model.transform(rows)
    assert made.columns == [*rows.columns, "output_0", "output_1", "prediction", "probability", "rawPrediction"]
    found = made.collect()
    assert len(found) == 30
    words = np.array([row.word for row in found])
    x = np.array([[row.a, *row.v.toArray()] for row in found], np.float32)
    kind, size = (each.numpy() for each in native({"word": words, "x": x}))
    assert np.allclose([row.output_0 for row in found], kind, atol=1e-5)
    assert np.allclose([row.output_1 for row in found], size, atol=1e-5)
    assert [row.prediction for row in found] == kind.argmax(1).tolist()
    assert np.allclose([row.probability.toArray() for row in found], kind, atol=1e-6)


def test_own_layers_inference_fn_and_threads_reach_the_executors(rows: Any) -> None:
    class Here(Doubled):
        """Registered nowhere, and sent by value, as those of a notebook are."""

    def tenfold(features: dict[str, Any]) -> dict[str, Any]:
        import tensorflow as tf

        assert tf.config.threading.get_intra_op_parallelism_threads() == 1
        return {"features_0": features["features_0"] * 10}

    model = model_of(net(Here()), [JOINED], OutputShape("<f4", (3,)), inference_fn=tenfold)
    assert all(row.output[0] == pytest.approx(20 * row.a) for row in model.transform(rows).collect())


# --- saving -------------------------------------------------------------------------------------


def test_a_saved_model_gives_the_same_and_a_damaged_one_is_an_error_of_ours(rows: Any, tmp_path: Path) -> None:
    layers = keras.layers
    made = net(layers.Dense(4), layers.BatchNormalization())
    model = model_of(made, [JOINED], OutputShape("<f4", (4,)), prediction_col="class", prediction="argmax")
    model.save(str(tmp_path / "model"))
    loaded = ElasticKerasModel.load(str(tmp_path / "model"))
    assert (loaded.uid, loaded.getPredictionCol()) == (model.uid, "class")
    assert (loaded.history, loaded.events) == (model.history, model.events)
    x = np.ones((2, 3), np.float32)
    assert np.array_equal(loaded.keras_model(x), model.keras_model(x))
    assert sorted(loaded.transform(rows).collect()) == sorted(model.transform(rows).collect())
    archive = tmp_path / "model" / "data" / "model.keras"
    archive.write_bytes(archive.read_bytes()[:-100])
    (archive.parent / ".model.keras.crc").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: data.model.keras has"):
        ElasticKerasModel.load(str(tmp_path / "model"))
    with pytest.raises(InvalidSettingsError, match="has no keras_model"):
        ElasticKerasModel().keras_model  # noqa: B018


def test_classes_of_ones_own_need_trust_or_to_be_given_or_registered(spark: Any, tmp_path: Path) -> None:
    path, x = str(tmp_path / "model"), np.ones((2, 3), np.float32)
    model = model_of(net(Doubled()), [JOINED], OutputShape("<f4", (3,)))
    PipelineModel([model]).write().overwrite().save(path)
    with pytest.raises(CheckpointError, match=r"custom_objects in .* can only be loaded by running code"):
        PipelineModel.load(path)
    with trusted_files():
        assert PipelineModel.load(path).stages[0].keras_model(x)[0, 0] == 2
    alone = str(tmp_path / "alone")
    model.save(alone)
    assert ElasticKerasModel.load(alone, custom_objects={"Doubled": Doubled}).keras_model(x)[0, 0] == 2
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*\(it needs Doubled\)"):
        ElasticKerasModel.load(alone, custom_objects={"Other": Doubled})
    registered = str(tmp_path / "registered")
    model_of(net(Summed()), [JOINED], NUMBER).save(registered)
    assert ElasticKerasModel.load(registered).keras_model(x)[0] == 3


def test_a_lambda_is_code_and_needs_trust(spark: Any, tmp_path: Path) -> None:
    path, x = str(tmp_path / "model"), np.ones((2, 3), np.float32)
    model_of(net(keras.layers.Lambda(lambda x: x + 1)), [JOINED], OutputShape("<f4", (3,))).save(path)
    for given in (None, {"<lambda>": None}):
        with pytest.raises(CheckpointError, match="Lambda layers, which are code"):
            ElasticKerasModel.load(path, custom_objects=given)
    metadata = next((tmp_path / "model" / "metadata").glob("part-*"))
    metadata.write_text(metadata.read_text().replace('"<lambda>"', ""))
    (metadata.parent / f".{metadata.name}.crc").unlink()
    with pytest.raises(CheckpointError, match=r"(?i)model.keras cannot be loaded: .*lambda"):
        ElasticKerasModel.load(path)  # whatever it says of itself
    assert ElasticKerasModel.load(path, trusted=True).keras_model(x)[0, 0] == 2


def test_a_saved_estimator_comes_back_with_a_model_that_is_compiled_as_it_was(spark: Any, tmp_path: Path) -> None:
    model = net(keras.layers.Dense(2))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.9)
    model.compile(keras.optimizers.Adam(schedule), keras.losses.Huber(2.0), metrics=["mse", keras.metrics.AUC()])
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    made = ElasticKerasEstimator(
        model=model,
        loss_weights=[2.0],
        callbacks=[EarlyStopping("loss")],
        epochs=3,
        feature_cols=["a"],
        metrics=["mae"],
    )
    made.save(str(tmp_path / "safe"))
    loaded = ElasticKerasEstimator.load(str(tmp_path / "safe"))
    assert {p.name: loaded.isSet(p) for p in loaded.params} == {p.name: made.isSet(p) for p in made.params}
    before, after = (each._fit_run().compile_arguments() for each in (made, loaded))
    assert after.optimizer.get_config() == before.optimizer.get_config()
    assert after.loss.get_config() == before.loss.get_config()
    assert (after.metrics, after.loss_weights) == (["mae"], [2.0])
    assert int(loaded.getModel().optimizer.iterations) == 1
    assert np.array_equal(loaded.getModel().get_weights()[0], model.get_weights()[0])
    assert loaded.getCallbacks()[0].monitor.name == "loss"


def own(label: Any, output: Any) -> Any:
    return keras.ops.mean(label - output)


def test_a_saved_estimator_with_code_of_ones_own_needs_trust(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "estimator")
    model = net(Doubled())
    model.compile("adam", own)
    ElasticKerasEstimator(model=model, loss=own).save(path)
    with pytest.raises(CheckpointError, match=r"loss, model in .* can only be loaded by running code"):
        ElasticKerasEstimator.load(path)
    loaded = ElasticKerasEstimator.load(path, trusted=True)
    assert loaded.getLoss() is own
    assert loaded.getModel()._compile_config.config["loss"] is own

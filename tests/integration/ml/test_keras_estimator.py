"""`fit` of Keras models on a cluster: in Spark ML's own tools, on real data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit
from pyspark.sql import functions as F

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")

from spark_elastic import ElasticKerasEstimator  # noqa: E402
from spark_elastic.errors import DataError  # noqa: E402
from tests.unit.ml.keras.estimators import HereEstimator, weights_of  # noqa: E402

PIXELS = [f"p{index}" for index in range(64)]


def accuracy() -> Any:
    return MulticlassClassificationEvaluator(metricName="accuracy")


def digit_net() -> Any:
    layers = keras.layers
    first, last = (keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2))
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(32, activation="relu", kernel_initializer=first),
            layers.Dense(10, activation="softmax", kernel_initializer=last),
        ]
    )


def digit_settings(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": digit_net(),
        "optimizer": keras.optimizers.Adam(5e-3),
        "loss": "sparse_categorical_crossentropy",
        "feature_cols": ["pixels"],
        "label_cols": ["label"],
        "batch_size": 64,
        "epochs": 8,
        "verbose": 0,
        **changes,
    }
    return {name: value for name, value in made.items() if value is not None}


def prepared(df: Any) -> Any:
    return VectorAssembler(inputCols=PIXELS, outputCol="pixels").transform(
        df.withColumn("label", F.substring("digit", 7, 1).cast("double"))
    )


def test_a_pipeline_learns_digits_as_well_as_keras_alone_and_is_saved_and_loaded_as_a_whole(
    digits: Any, tmp_path: Path
) -> None:
    train, test = digits
    estimator = ElasticKerasEstimator(
        **digit_settings(num_proc=2, validation=0.1, metrics=["accuracy"], probability_col="probability")
    )
    stages = [
        VectorAssembler(inputCols=PIXELS, outputCol="pixels"),
        StringIndexer(inputCol="digit", outputCol="label"),
        estimator,
    ]
    model = Pipeline(stages=stages).fit(train)
    trained = model.stages[-1]
    scored = model.transform(test)
    found = accuracy().evaluate(scored)
    assert found > 0.9
    assert trained.history["val_loss"][-1] < trained.history["val_loss"][0]
    assert trained.history["val_accuracy"][-1] > 0.85
    assert [event["after"] for event in trained.events if event["kind"] == "started"] == [2]
    assert set(trained.fit_seconds) == {"write", "try", "train", "load"}

    alone = digit_net()
    alone.compile(keras.optimizers.Adam(5e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = (
        np.array([[float(value) for value in row] for row in part.select(PIXELS).collect()]) for part in (train, test)
    )
    labels, expected = (
        np.array([int(row.digit[6:]) for row in part.select("digit").collect()]) for part in (train, test)
    )
    alone.fit(x, labels, batch_size=64, epochs=8, verbose=0)
    assert found == pytest.approx(alone.evaluate(y, expected, verbose=0)[1], abs=0.03)

    path = str(tmp_path / "pipeline")
    model.write().overwrite().save(path)
    columns = ["digit", "prediction", "probability"]
    both = [
        sorted(map(str, each.select(columns).collect())) for each in (PipelineModel.load(path).transform(test), scored)
    ]
    assert both[0] == both[1]


@pytest.mark.soak
def test_a_cross_validator_and_a_train_validation_split_find_the_better_model(digits: Any, tmp_path: Path) -> None:
    df, estimator = prepared(digits[0]).cache(), HereEstimator(**digit_settings(store=str(tmp_path)))
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 10]).build()
    tools: dict[str, Any] = {"estimator": estimator, "estimatorParamMaps": grid, "evaluator": accuracy(), "seed": 1}
    crossed = CrossValidator(**tools, numFolds=2).fit(df)
    assert max(crossed.avgMetrics) == crossed.avgMetrics[1] > 0.9
    assert accuracy().evaluate(crossed.transform(prepared(digits[1]))) > 0.9
    split = TrainValidationSplit(**tools, trainRatio=0.7).fit(df)
    assert split.validationMetrics[1] > split.validationMetrics[0]


def test_a_saved_estimator_trains_as_the_one_that_was_saved(digits: Any, tmp_path: Path) -> None:
    model = digit_net()
    model.compile(keras.optimizers.Adam(5e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    estimator = HereEstimator(**digit_settings(model=model, optimizer=None, loss=None, epochs=2))
    df, path = prepared(digits[0]), str(tmp_path / "estimator")
    Pipeline(stages=[estimator]).save(path)
    loaded = Pipeline.load(path).getStages()[0]
    one, other = loaded.fit(df), estimator.fit(df)
    assert weights_of(one) == weights_of(other)
    assert one.history["accuracy"] == other.history["accuracy"]


def test_columns_weights_and_the_rows_set_aside_decide_what_is_learnt(digits: Any) -> None:
    df = prepared(digits[0]).withColumn("half", F.col("p20") > 0.5).withColumn("w", F.col("p20") + 0.01).cache()

    def trained(**changes: Any) -> Any:
        made = HereEstimator(**digit_settings(epochs=1, **changes))
        return made, weights_of(made.fit(df))

    _, plain = trained()
    binary = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    for changes in (
        {"label_cols": ["half"], "model": binary, "loss": loss},
        {"sample_weight_col": "w"},
        {"validation": 0.3},
        {"validation": "half"},
    ):
        made, weights = trained(**changes)
        assert weights != plain
        if changes.get("validation") == "half":
            assert made.training.dataset.rows("validation") == df.where("half").count()


def test_several_inputs_and_outputs_are_columns_in_their_order(digits: Any) -> None:
    df = prepared(digits[0]).withColumn("row", F.col("label").cast("int"))
    pixels, row = keras.Input((64,), name="pixels"), keras.Input((1,), dtype="int32", name="row")
    joined = keras.layers.Concatenate()([pixels, keras.layers.Flatten()(keras.layers.Embedding(10, 3)(row))])
    kind = keras.layers.Dense(10, activation="softmax", name="kind")(joined)
    size = keras.layers.Dense(1, name="size")(joined)
    estimator = HereEstimator(
        **digit_settings(
            model=keras.Model([pixels, row], [kind, size]),
            loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.5},
            metrics={"kind": ["accuracy"]},
            feature_cols=[["pixels"], ["row"]],
            label_cols=["label", "p20"],
            epochs=3,
        )
    )
    model = estimator.fit(df)
    assert {"kind_accuracy", "kind_loss", "size_loss"} <= set(model.history.names)
    assert model.history["loss"][-1] == pytest.approx(
        model.history["kind_loss"][-1] + 0.5 * model.history["size_loss"][-1], rel=1e-4
    )
    scored = model.transform(df).select("output_0", "output_1", "prediction", "label").collect()
    assert np.mean([row.prediction == row.label for row in scored]) > 0.5
    assert (len(scored[0].output_0), len(scored[0].output_1)) == (10, 1)


def test_labels_that_the_loss_cannot_compare_are_named_before_any_worker_starts(digits: Any) -> None:
    df = prepared(digits[0])
    for changes, said in (
        ({"loss": "categorical_crossentropy"}, "use sparse_categorical_crossentropy"),
        ({"model": keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])}, r"features_0 .*\[4, 64\]"),
        ({"label_cols": ["digit"]}, "label_cols 'digit' is string"),
    ):
        estimator = HereEstimator(**digit_settings(**changes))
        with pytest.raises(DataError, match=f"(?s){said}"):
            estimator.fit(df)
        assert not hasattr(estimator, "training")

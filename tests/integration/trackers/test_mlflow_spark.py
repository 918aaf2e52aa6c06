"""MLflow with a Spark session: autologging, Spark models, and classes of the user's own behind mlflow.pyfunc."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as F

from spark_elastic import ElasticTorchEstimator, MLflowCallback
from spark_elastic.data.catalog import delete_temporary
from spark_elastic.errors import CheckpointError
from tests.integration.clusters import local
from tests.integration.trackers.own_net import OwnNet

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def rows() -> Iterator[Any]:
    with local(2, spark_sql_shuffle_partitions="2") as cluster:
        cluster.sc.setLogLevel("OFF")
        random = cluster.spark.range(200).select(F.rand(1).alias("a"), F.rand(2).alias("b"))
        yield random.withColumn("label", (F.col("a") > F.col("b")).cast("int")).localCheckpoint()
        delete_temporary()


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import mlflow

    folder, before = tmp_path_factory.mktemp("tracking"), mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs.db")
    made = mlflow.create_experiment("tests", artifact_location=(folder / "artifacts").as_uri())
    mlflow.set_experiment(experiment_id=made)
    yield mlflow
    assert mlflow.active_run() is None
    mlflow.set_tracking_uri(before)


@pytest.fixture
def autologging(mlflow: Any, monkeypatch: Any) -> Iterator[None]:
    import mlflow.pyspark.ml as autologger

    # MLflow loads each model in another process to see what it imports, which takes minutes on a busy machine
    monkeypatch.setenv("MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT", "1")

    autologger.autolog(log_model_allowlist=["spark_elastic.ml.*"], log_datasets=False, log_model_signatures=False)
    yield
    autologger.autolog(disable=True)


def loss_of_my_own(output: Any, label: Any) -> Any:
    return torch.nn.functional.cross_entropy(output, label)


def estimator(*callbacks: Any) -> ElasticTorchEstimator:
    return ElasticTorchEstimator(
        model=OwnNet(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        loss=loss_of_my_own,
        metrics={"mean": lambda output, label: output.mean()},
        feature_cols=["a", "b"],
        label_cols="label",
        epochs=2,
        num_proc=1,
        verbose=0,
        prediction="argmax",
        storage_options={"secret": "hunter2"},
        run_options={"env": {"MLFLOW_TRACKING_TOKEN": "hunter3"}},
        callbacks=list(callbacks),
    )


def checked_run(mlflow: Any, run_id: str, model: Any) -> Any:
    """The run, once its parameters and metrics are what the fit had."""
    run = mlflow.get_run(run_id)
    params = run.data.params
    assert params["epochs"] == "2"
    assert params["loss"].endswith(".loss_of_my_own")
    assert params["optimizer"] == "torch.optim.sgd.SGD(lr=0.1)"
    bad = {name: v for name, v in params.items() if "None" in v or " at 0x" in v or "hunter" in v}
    assert bad == {}
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    assert [(each.step, each.value) for each in history] == list(enumerate(model.history["loss"]))
    return run


def test_autologging_alone_logs_settings_epochs_and_a_model_that_pyfunc_serves_once_it_is_trusted(
    mlflow: Any, rows: Any, autologging: None, monkeypatch: Any
) -> None:
    model = estimator().fit(rows)
    run = checked_run(mlflow, mlflow.last_active_run().info.run_id, model)
    assert run.data.tags["mlflow.autologging"] == "pyspark.ml"
    uri = f"runs:/{run.info.run_id}/model"
    with pytest.raises(CheckpointError, match="SPARK_ELASTIC_TRUST"):
        mlflow.pyfunc.load_model(uri)
    monkeypatch.setenv("SPARK_ELASTIC_TRUST", "all")
    served = mlflow.pyfunc.load_model(uri)
    asked = pd.DataFrame({"a": [0.9, 0.1], "b": [0.1, 0.9]})
    own = [row["prediction"] for row in model.transform(rows.sparkSession.createDataFrame(asked)).collect()]
    assert list(served.predict(asked)) == own


def test_autologging_and_callback_log_to_one_run_and_nothing_twice(mlflow: Any, rows: Any, autologging: None) -> None:
    count = len(mlflow.search_runs())
    tracker = MLflowCallback()
    model = estimator(tracker).fit(rows)
    assert len(mlflow.search_runs()) == count + 1
    run = checked_run(mlflow, str(tracker.run_id), model)
    assert run.info.status == "FINISHED"
    logged = mlflow.search_logged_models(filter_string=f"source_run_id='{tracker.run_id}'", output_format="list")
    names = sorted(each.name for each in logged)
    assert "native_model" in names
    artifacts = {each.path for each in mlflow.MlflowClient().list_artifacts(tracker.run_id)}
    assert "spark_model" not in artifacts, "autologging has logged it as model"


def test_search_under_autologging_keeps_its_own_run_free_of_the_curves_of_its_fits(
    mlflow: Any, rows: Any, autologging: None
) -> None:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit

    fitted = estimator()
    grid = ParamGridBuilder().addGrid(fitted.epochs, [1, 3]).build()
    evaluator = MulticlassClassificationEvaluator(labelCol="label")
    search = TrainValidationSplit(estimator=fitted, estimatorParamMaps=grid, evaluator=evaluator, seed=1)
    best = search.fit(rows).bestModel
    history = mlflow.MlflowClient().get_metric_history(mlflow.last_active_run().info.run_id, "loss")
    assert len(history) == len(best.history), "only the last fit, on all rows"


def inputs_of(served: Any) -> list[tuple[str, str]]:
    """The name and the type of each column that a model takes."""
    return [(each.name, getattr(each.type, "name", repr(each.type))) for each in served.metadata.signature.inputs]


def test_both_models_take_a_pandas_frame_of_the_training_columns(mlflow: Any, rows: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_TRUST", "all")
    tracker = MLflowCallback()
    floats = rows.withColumn("b", F.col("b").cast("float"))
    model = estimator(tracker).fit(floats)
    asked = floats.select("a", "b").limit(5).toPandas()
    asked.index = list("vwxyz")
    with torch.no_grad():
        expected = model.module(torch.tensor(asked.to_numpy(), dtype=torch.float32)).numpy()
    native = mlflow.pyfunc.load_model(f"runs:/{tracker.run_id}/native_model")
    assert inputs_of(native) == [("a", "double"), ("b", "double")]
    for frame in (asked, asked.astype("float64"), asked[["b", "a"]].assign(more="text")):
        made = native.predict(frame)
        assert list(made.index) == list("vwxyz")
        assert np.allclose(made, expected, atol=1e-6)
    with pytest.raises(MlflowException, match=r"missing inputs \['b'\]"):
        native.predict(asked[["a"]])
    served = mlflow.pyfunc.load_model(f"runs:/{tracker.run_id}/spark_model")
    assert inputs_of(served) == inputs_of(native)
    assert list(served.predict(asked)) == expected.argmax(1).tolist() == model.predict(asked)["prediction"].tolist()


def test_spark_model_takes_lists_for_vectors_and_arrays(mlflow: Any, rows: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_TRUST", "all")
    joined = rows.select(array_to_vector(F.array("a")).alias("v"), F.array("b").alias("w"), "label")
    tracker = MLflowCallback()
    fitted = estimator(tracker).setFeatureCols([["v", "w"]])
    model = fitted.fit(joined)
    asked = pd.DataFrame({"v": [[0.9], [0.1]], "w": [[0.1], [0.9]]})
    served = mlflow.pyfunc.load_model(f"runs:/{tracker.run_id}/spark_model")
    assert inputs_of(served) == [("v", "SparkML vector"), ("w", "Array(double)")]
    assert list(served.predict(asked)) == model.predict(asked)["prediction"].tolist()
    native = mlflow.pyfunc.load_model(f"runs:/{tracker.run_id}/native_model")
    features = np.array([[0.9, 0.1], [0.1, 0.9]], np.float32)
    assert np.allclose(native.predict(features), np.stack(list(model.predict(asked)["output"])), atol=1e-6)

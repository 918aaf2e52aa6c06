"""`fit` on a cluster: in Spark ML's own tools, on real data, and what is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions as F
from torch import nn

from spark_elastic import ElasticKerasEstimator, ElasticTorchEstimator, ElasticTorchModel, trusted_files
from spark_elastic.data.materialization import write_dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, DataError
from spark_elastic.runs.checkpoints import Checkpoints
from tests.integration.ml.modules import Ids
from tests.integration.processes import wait_for_file
from tests.unit.ml.torch.estimators import HereEstimator, make_set, weights_of
from tests.unit.ml.torch.estimators import estimator as small_estimator

ROOT = Path(__file__).resolve().parents[3]
PIXELS = [f"p{index}" for index in range(64)]


def accuracy() -> Any:
    return MulticlassClassificationEvaluator(metricName="accuracy")


def digit_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=5e-3)


def digit_settings(**changes: Any) -> dict[str, Any]:
    common = {"feature_cols": ["pixels"], "label_cols": ["label"], "batch_size": 64, "epochs": 8, "verbose": 0}
    return {"model": digit_net(), "optimizer": adam, "loss": nn.CrossEntropyLoss(), **common, **changes}


def keras_digit_estimator() -> Any:
    keras = pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    net = keras.Sequential([keras.Input((64,)), *layers])
    net.compile(keras.optimizers.Adam(5e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    common = {"feature_cols": ["pixels"], "label_cols": ["label"], "batch_size": 64, "epochs": 8, "verbose": 0}
    return ElasticKerasEstimator(model=net, num_proc=2, validation=0.1, **common)


def prepared(df: Any) -> Any:
    return VectorAssembler(inputCols=PIXELS, outputCol="pixels").transform(
        df.withColumn("label", F.substring("digit", 7, 1).cast("double"))
    )


def digit_estimator() -> Any:
    return ElasticTorchEstimator(**digit_settings(num_proc=2, validation=0.1, output_type="vector"))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(digit_estimator, id="torch"),
        pytest.param(keras_digit_estimator, id="keras", marks=pytest.mark.nightly),
    ],
)
def test_a_pipeline_learns_digits_and_is_saved_and_loaded_as_a_whole(make: Any, digits: Any, tmp_path: Path) -> None:
    train, test = digits
    stages = [
        VectorAssembler(inputCols=PIXELS, outputCol="pixels"),
        StringIndexer(inputCol="digit", outputCol="label"),
        make(),
    ]
    model = Pipeline(stages=stages).fit(train)
    trained = model.stages[-1]
    scored = model.transform(test)
    assert accuracy().evaluate(scored) > 0.9
    assert trained.history["val_loss"][-1] < trained.history["val_loss"][0]
    assert [event["after"] for event in trained.events if event["kind"] == "started"] == [2]
    assert set(trained.fit_seconds) == {"write", "try", "train", "load"}
    path = str(tmp_path / "pipeline")
    model.write().overwrite().save(path)
    loaded = PipelineModel.load(path)
    columns = ["digit", "prediction", "output"]
    both = [sorted(map(str, each.select(columns).collect())) for each in (loaded.transform(test), scored)]
    assert both[0] == both[1]


@pytest.mark.nightly
def test_a_cross_validator_finds_the_better_model_and_each_fold_is_written_once(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimator = HereEstimator(**digit_settings(store=str(tmp_path), dataset_id="all"))
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 10]).addGrid(estimator.batch_size, [32, 512]).build()
    written: list[Any] = []

    def counted(*args: Any) -> Any:
        written.append(write_dataset(*args))
        return written[-1]

    monkeypatch.setattr("spark_elastic.data.materialization.write_dataset", counted)
    model = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=accuracy(), numFolds=2, parallelism=2, seed=1
    ).fit(prepared(digits[0]))
    assert len(written) == 3, "two folds, and all rows for the best"
    assert max(model.avgMetrics) == max(model.avgMetrics[2:]) > 0.9, "more epochs are better"
    assert accuracy().evaluate(model.transform(prepared(digits[1]))) > 0.9
    assert sum(fold.rows() for fold in written[:2]) == written[2].rows(), "no fold gets rows of the name"
    left = [dataset for dataset in written if dataset.store.exists("manifest.json")]
    assert left == written[2:], "the rows of the name stay"


def test_a_saved_estimator_trains_as_the_one_that_was_saved(digits: Any, tmp_path: Path, caplog: Any) -> None:
    net = digit_net()
    optimizer = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.5}], lr=0.1)
    estimator = HereEstimator(**digit_settings(model=net, optimizer=optimizer, epochs=2))
    df = prepared(digits[0])
    path = str(tmp_path / "estimator")
    Pipeline(stages=[estimator]).save(path)
    loaded = Pipeline.load(path).getStages()[0]  # layers and an optimizer of torch need no trust
    assert {p.name: loaded.isSet(p) for p in loaded.params} == {p.name: estimator.isSet(p) for p in estimator.params}
    assert weights_of(loaded.fit(df)) == weights_of(estimator.fit(df))
    secret, store = "hunter" + "2", Store("s3://AKIA:hunter2@bucket", "bucket", filesystem=object())
    options = {"env": {"TOKEN": secret}, "output_dir": f"https://{secret}@host", "start_timeout": 60.0}
    own = HereEstimator(**digit_settings(model=net, optimizer=adam, store=store, run_options=options))
    own.write().overwrite().save(path)
    assert not [each for each in Path(path).rglob("*") if each.is_file() and secret.encode() in each.read_bytes()]
    with pytest.raises(CheckpointError, match=r"optimizer in .* can only be loaded by running code"):
        HereEstimator.load(path)
    with trusted_files(), caplog.at_level("WARNING", logger="spark_elastic.ml"):
        assert (again := HereEstimator.load(path)).getOptimizer() is adam
    assert (again.getRunOptions(), again.getStore()) == ({"start_timeout": 60.0}, None)
    assert "store, run_options['env'], run_options['output_dir'] of the HereEstimator" in caplog.text


def scripted(shapes: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(shapes[0][1], 32), nn.ReLU(), nn.Linear(32, 10)))
    return made


def test_model_of_a_function_is_fitted_applied_saved_and_loaded(digits: Any, tmp_path: Path) -> None:
    df = prepared(digits[0])
    estimator = HereEstimator(**digit_settings(model=scripted, epochs=2))
    model = estimator.fit(df)
    assert weights_of(model) == pytest.approx(weights_of(HereEstimator(**digit_settings(epochs=2)).fit(df)), abs=1e-4)
    path = str(tmp_path / "model")
    model.save(path)
    with pytest.raises(CheckpointError, match=r"architecture in .* can only be loaded by running code"):
        ElasticTorchModel.load(path)
    loaded = ElasticTorchModel.load(path, trusted=True)
    filled = ElasticTorchModel.load(path, module=digit_net())
    columns = ["digit", "prediction", "output"]
    rows = [sorted(map(str, each.transform(df).select(columns).collect())) for each in (model, loaded)]
    assert rows[0] == rows[1]
    assert weights_of(loaded) == weights_of(filled) == weights_of(model)
    again = estimator.copy({estimator.epochs: 1})
    again.save(str(tmp_path / "estimator"))
    with trusted_files():
        assert len(HereEstimator.load(str(tmp_path / "estimator")).fit(df).history) == 1


def test_fit_takes_param_maps_and_several_of_them(digits: Any) -> None:
    df = prepared(digits[0])
    estimator = HereEstimator(**digit_settings(epochs=1))
    assert len(estimator.fit(df, {estimator.epochs: 2}).history) == 2
    models = estimator.fit(df, [{estimator.epochs: 1}, {estimator.epochs: 3}])
    assert [len(model.history) for model in models] == [1, 3]


@pytest.mark.nightly
def test_integers_reach_the_model_as_they_are_or_are_refused(spark: Any, tmp_path: Path) -> None:
    rows = [(20_000_001 + index, 2**40 + index, float(index)) for index in range(8)]
    df = spark.createDataFrame(rows, "user long, item long, price double").withColumn("label", F.col("price"))
    made = HereEstimator(
        model=Ids(),
        optimizer=adam,
        loss=nn.MSELoss(),
        feature_cols=[["user", "item"], ["price"]],
        label_cols=["label"],
        validation=0.3,
        verbose=0,
    )
    made.fit(df).save(str(tmp_path / "model"))
    loaded = ElasticTorchModel.load(str(tmp_path / "model"), trusted=True)
    for row in loaded.transform(df).collect():
        assert row.output_1 == [row.user, row.item]
    with pytest.raises(DataError, match=r"'user': .* integers such as 2000000\d .* float32 holds exactly") as caught:
        made.setFeatureCols([["user", "price"], ["item"]]).fit(df)
    assert "input_dtypes=[...]" in str(caught.value)
    whole = df.withColumn("user", F.col("user").cast("decimal(38, 0)"))
    with pytest.raises(DataError, match=r"'user': .* integers such as"):
        made.setFeatureCols([["user", "price"], ["item"]]).fit(whole)


def test_nan_is_allowed_where_data_options_say_so(digits: Any) -> None:
    df = prepared(digits[0]).withColumn("p1", F.when(F.col("p20") > 0.5, float("nan")).otherwise(0.0))
    estimator = HereEstimator(
        **digit_settings(feature_cols=PIXELS, epochs=1, data_options={"allow_nan": True}, allow_nan_loss=True)
    )
    assert len(estimator.fit(df).history) == 1


ENDLESS = """
import sys
from tests.unit.ml.torch.estimators import estimator
estimator(epochs=10**6, checkpoint_dir=sys.argv[2], run_id="a").from_dataset_path(sys.argv[1])
"""


def test_a_fit_whose_driver_was_killed_goes_on_under_its_run_id(tmp_path: Path) -> None:
    dataset = make_set(tmp_path / "set")
    runs = tmp_path / "runs"
    driver = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "set"), str(runs)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    try:
        wait_for_file(runs, "checkpoint.json", 120, "a checkpoint")
    finally:
        driver.kill()
        driver.wait()
    reached = Checkpoints(Store.create(runs / "a" / "checkpoints")).latest()
    assert reached is not None
    total = reached.epoch + 3
    again = small_estimator(epochs=total, checkpoint_dir=str(runs), run_id="a")
    model = again.from_dataset_path(dataset)
    assert again.training.resume_from == reached.name
    whole = small_estimator(epochs=total).from_dataset_path(dataset)
    assert weights_of(model) == weights_of(whole)
    assert model.history["loss"] == whole.history["loss"]

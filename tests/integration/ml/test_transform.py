"""`transform` on a cluster: what it keeps, what it adds, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.errors import PythonException
from pyspark.ml import PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator, MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from torch import nn

from spark_elastic import ElasticTorchModel, load_module, trusted_files
from spark_elastic.data.manifest import TensorField
from spark_elastic.errors import CheckpointError, DataError, InvalidSettingsError
from spark_elastic.ml.added_columns import OutputShape
from spark_elastic.ml.fitted import Fitted
from spark_elastic.reporting.history import History
from spark_elastic.runs.trust import TRUST_VARIABLE
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.session import cluster_of
from tests.integration.ml.modules import Logging, TwoInputs
from tests.nightly import by_night

JOINED = TensorField("features_0", ("a", "v"), "<f4", (3,))
WORD = TensorField("features_1", ("word",), "<i8", ())


def model_of(module: nn.Module, inputs: Any, *outputs: OutputShape, rule: str | None = None, **settings: Any) -> Any:
    made = ElasticTorchModel(**settings)
    event = {"seconds": 1.5, "kind": "finished", "text": "done"}
    made._attach(module, Fitted(tuple(inputs), outputs, rule, History([{"epoch": 0, "loss": 0.5}]), (event,)))
    return made


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    made = [(index, index / 10, Vectors.dense([1.0, index]), index % 5, f"row {index}") for index in range(30)]
    made[7] = (7, 0.7, Vectors.sparse(2, {1: 7.0}), 2, "row 7")
    df = spark.createDataFrame(made, ["id", "a", "v", "word", "text"])
    return (
        df.withColumn("id", F.col("id").cast("int").alias("id", metadata={"what": "a number"})).repartition(3).cache()
    )


@pytest.fixture(params=by_night(["only what is needed", "all columns"], but=["only what is needed"]))
def sent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return which columns go to Python: those of the model, since Spark 4.1, or all, in earlier versions."""
    if request.param == "all columns":
        monkeypatch.setattr(Cluster, "has_arrow_udfs", lambda cluster: False)
    elif not cluster_of(request.getfixturevalue("rows").sparkSession).has_arrow_udfs():
        pytest.skip("this version of Spark has no Arrow UDFs")
    return str(request.param)


def test_columns_are_kept_and_outputs_are_what_the_module_gives(rows: Any, sent: str) -> None:
    module = TwoInputs()
    model = model_of(module, [JOINED, WORD], OutputShape("<f4", (4,)), OutputShape("<f4", ()), rule="argmax")
    made = model.transform(rows)
    assert made.columns == [*rows.columns, "output_0", "output_1", "prediction", "probability", "rawPrediction"]
    for before, after in zip(rows.schema, made.schema, strict=False):
        assert before == after
        assert before.metadata == after.metadata
    before = {row.id: row for row in rows.collect()}
    found = made.collect()
    assert len(found) == 30
    for row in found:
        assert row[: len(rows.columns)] == before[row.id][:]
        x = torch.tensor([[row.a, *row.v.toArray()]], dtype=torch.float32)
        kind, size = module(x, torch.tensor([row.word]))
        assert np.allclose(row.output_0, kind[0].tolist(), atol=1e-5)
        assert row.output_1 == pytest.approx(size.item(), abs=1e-5)
        assert row.prediction == kind.argmax().item()
    assert model.transformSchema(rows.schema) == made.schema
    frame = made.toPandas()
    predicted = model.predict(frame[["word", "v", "a"]])
    assert list(predicted.columns) == made.columns[len(rows.columns) :]
    for name in predicted.columns:
        assert np.allclose(np.stack(list(predicted[name])), np.stack(list(frame[name])), atol=1e-6)


def test_columns_that_differ_in_case_alone_are_told_apart_where_spark_does(spark: Any, sent: str) -> None:
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        df = spark.range(3).select(F.col("id").alias("x"), (F.col("id") * 10).alias("X"), F.lit(0).alias("Output"))
        inputs = [TensorField("features_0", ("x",), "<f4", (1,)), TensorField("features_1", ("X",), "<f4", (1,))]
        made = model_of(Weighted(), inputs, OutputShape("<f4", (1,))).transform(df)
        assert made.columns == ["x", "X", "Output", "output", "prediction"]
        assert sorted(row.prediction for row in made.collect()) == [0.0, 12.0, 24.0]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    with pytest.raises(DataError, match=r"has a column .Output. already"):
        model_of(Weighted(), inputs, OutputShape("<f4", (1,))).transform(df)


class Weighted(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * x + y


KINDS = {
    "byte": "cast(id as byte)",
    "short": "cast(id as short)",
    "int": "cast(id as int)",
    "long": "id",
    "float": "cast(id as float)",
    "double": "cast(id as double)",
    "boolean": "id % 2 = 0",
    "decimal": "cast(id as decimal(10,2))",
    "array": "array(cast(id as float), 2f)",
    "of arrays": "array(array(id, 2L), array(3L, 4L))",
    "of decimals": "array(cast(id as decimal(10,2)), cast(2 as decimal(10,2)))",
    "one more int": "cast(id + 1 as int)",
    "third int": "cast(id + 2 as int)",
    "fourth int": "cast(id + 3 as int)",
}


@pytest.mark.parametrize("source", by_night(["rows", "cached", "parquet", "orc", "stream"], but=["rows", "stream"]))
def test_features_of_all_types_come_as_they_are(spark: Any, sent: str, source: str, tmp_path: Path) -> None:
    df = spark.range(100, numPartitions=2).selectExpr("id", *(f"{made} AS `{name}`" for name, made in KINDS.items()))
    expected = {row.id: row for row in df.collect()}
    if source == "cached":
        df = df.cache()
    elif source in ("parquet", "orc"):
        df.write.format(source).save(str(tmp_path / "rows"))
        df = spark.read.format(source).load(str(tmp_path / "rows"))
    elif source == "stream":
        df.write.parquet(str(tmp_path / "rows"))
        df = spark.readStream.schema(df.schema).parquet(str(tmp_path / "rows"))
    shapes = {"array": (2,), "of arrays": (2, 2), "of decimals": (2,)}
    inputs = TensorField("features_0", tuple(KINDS), "<f4", (len(KINDS) + 5,))
    for vectors in (False, True):
        settings = {"output_type": "vector", "probability_col": "chances"} if vectors else {}
        model = model_of(nn.Identity(), [inputs], OutputShape("<f4", inputs.shape), rule="argmax", **settings)
        made = model.transform(df)
        name = f"kinds_{sent}_{vectors}".replace(" ", "_")
        if source == "stream":
            writer = made.writeStream.format("memory").queryName(name).trigger(availableNow=True)
            assert writer.option("checkpointLocation", str(tmp_path / name)).start().awaitTermination(120)
            made = spark.table(name)
        found = made.collect()
        assert len(found) == 100
        for row in found:
            values = [np.ravel(np.array(expected[row.id][kind], float)) for kind in KINDS]
            assert [len(each) for each in values] == [int(np.prod(shapes.get(kind, ()))) for kind in KINDS]
            output = row.output.toArray() if vectors else row.output
            assert list(output) == np.concatenate(values).tolist()
        if source == "rows":
            columns = df.toArrow() if hasattr(df, "toArrow") else df.toPandas()
            predicted = model.predict(columns)
            rows_of = predicted.to_pandas() if hasattr(predicted, "to_pandas") else predicted
            sent_rows = made.drop(*df.columns).toPandas()
            for each in rows_of.columns:
                there = [list(getattr(row, "values", row)) for row in sent_rows[each]] if each != "prediction" else []
                assert [list(row) for row in rows_of[each]] == there if there else True
    df.unpersist()


def test_what_is_computed_for_the_model_is_computed_once(spark: Any, sent: str) -> None:
    counted = spark.sparkContext.accumulator(0)

    def slowly(value: int) -> float:
        counted.add(1)
        return value * 2.0  # of an int, Spark 3.5 would make null

    slow = F.udf(slowly, "float")
    df = spark.range(40, numPartitions=2).select("id", slow("id").alias("twice"))
    inputs = TensorField("features_0", ("twice", "id"), "<f4", (2,))
    made = model_of(nn.Identity(), [inputs], OutputShape("<f4", (2,)), rule="argmax").transform(df)
    assert len(made.where("prediction >= 0").where("output[0] >= 0").collect()) == 40
    assert counted.value == 40


def test_vectors_go_with_columns_of_partitions_and_constants(spark: Any, rows: Any, sent: str, tmp_path: Path) -> None:
    rows.withColumn("part", F.col("id") % 3).write.partitionBy("part").parquet(str(tmp_path / "rows"))
    df = spark.read.parquet(str(tmp_path / "rows")).withColumn("one", F.lit(1.0))
    for first in ("part", "one"):
        inputs = TensorField("features_0", (first, "v"), "<f4", (3,))
        made = model_of(nn.Identity(), [inputs], OutputShape("<f4", (3,)), rule="argmax").transform(df)
        assert sorted(row.output for row in made.select("output").collect()) == sorted(
            [1.0 if first == "one" else row.id % 3, *row.v.toArray()] for row in rows.collect()
        )
        inputs = TensorField("features_0", (first, "a"), "<f4", (2,))
        model = model_of(nn.Identity(), [inputs], OutputShape("<f4", (2,)), rule="argmax", output_type="vector")
        made = model.transform(df)
        assert {type(row.output).__name__ for row in made.where("part = 1").collect()} == {"DenseVector"}


def test_the_result_can_be_joined_with_what_it_was_made_of(rows: Any, sent: str) -> None:
    made = model_of(Logging("/dev/null"), [JOINED], OutputShape("<f4", ())).transform(rows)
    joined = rows.join(made, rows["id"] == made["id"]).select(rows["id"], made["output"])
    assert sorted(joined.collect()) == sorted(made.select("id", "output").collect())


AVERAGE = "(select avg(prediction) from scored)"
QUERIES = (
    f"select sum(abs(a - {AVERAGE})) from given",
    "select sum(case when id in (select id from scored where prediction = 0) then 1 else 0 end) from given",
    "select sum((select max(prediction) from scored where scored.id = given.id)) from given",
    "select sum(p) from given, lateral (select prediction p from scored where scored.id = given.id)",
    f"select count(*) from given one join given two on one.id = two.id and one.a >= {AVERAGE} - 1",
    f"select a from given order by a > {AVERAGE}, a",
    f"select count(*) from given group by a > {AVERAGE}",
)


@pytest.mark.parametrize("query", by_night(QUERIES, but=QUERIES[:2]))
def test_the_result_may_be_read_in_subqueries(spark: Any, rows: Any, sent: str, query: str) -> None:
    model = model_of(nn.Linear(3, 2), [JOINED], OutputShape("<f4", (2,)), rule="argmax")
    model.transform(rows).createOrReplaceTempView("scored")
    rows.createOrReplaceTempView("given")
    assert spark.sql(query).collect()


class Difference(nn.Module):
    """The logit of the second of two classes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 1:] - x[:, :1]


def test_outputs_suit_the_evaluators_of_spark_ml(rows: Any) -> None:
    labelled = rows.withColumn("label", (F.col("a") > 1.45).cast("double"))
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[1, 0] = 1.0
        linear.bias.copy_(torch.tensor([1.45, 0.0]))
    classes = model_of(linear, [JOINED], OutputShape("<f4", (2,)), rule="argmax").transform(labelled)
    logit = model_of(nn.Sequential(linear, Difference()), [JOINED], OutputShape("<f4", (1,)), rule="binary_logit")
    for made in (classes, logit.transform(labelled)):
        assert BinaryClassificationEvaluator().evaluate(made) == 1.0
        assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(made) == 1.0
        chances = torch.log_softmax(torch.tensor([[1.45, row.a] for row in labelled.collect()]), 1)
        wanted = nn.functional.nll_loss(chances, torch.tensor([int(row.label) for row in labelled.collect()])).item()
        log_loss = MulticlassClassificationEvaluator(metricName="logLoss").evaluate(made)
        assert log_loss == pytest.approx(wanted, abs=1e-6)
    number = model_of(Logging("/dev/null"), [JOINED], OutputShape("<f4", ())).transform(labelled)
    assert RegressionEvaluator(labelCol="output", predictionCol="prediction").evaluate(number) == 0.0


def test_a_model_is_loaded_once_by_each_worker_process_for_all_of_its_tasks(rows: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    model = model_of(Logging(str(log)), [JOINED], OutputShape("<f4", ()))
    for _ in range(3):
        model.transform(rows).write.format("noop").mode("overwrite").save()
    pids = log.read_text().split()
    assert pids
    assert len(pids) == len(set(pids)), "one process loaded it for several of the nine tasks"


def test_rows_without_a_value_are_refused_left_out_or_get_null(rows: Any, sent: str, tmp_path: Path) -> None:
    # Not by a UDF in Python: where one feeds `transform`, Spark may close, after a task that failed, the connection to
    # a Python process that a later task uses already ("Socket closed", CancelledKeyException).
    unknown = array_to_vector(F.array(F.lit(float("nan")), F.lit(1.0)))
    bad = rows.withColumn("a", F.when(F.col("id") != 5, F.col("a")))
    bad = bad.withColumn("v", F.when(F.col("id") == 9, unknown).otherwise(F.col("v")))
    settings = {"rule": "argmax", "output_type": "vector"}
    module = nn.Linear(3, 2)
    model_of(module, [JOINED], OutputShape("<f4", (2,)), **settings).save(str(tmp_path / "model"))
    model = ElasticTorchModel.load(str(tmp_path / "model"))
    with pytest.raises(PythonException, match=r"have (null|NaN).*handle_invalid='skip'"):
        model.transform(bad).collect()
    added = ["output", "prediction", "rawPrediction"]
    kept = model.setHandleInvalid("keep").transform(bad).orderBy("id").select("id", *added).collect()
    assert [row.id for row in kept if row[1:] == (None, None, None)] == [5, 9]
    assert all(None not in row for row in kept if row.id not in (5, 9))
    left = model.setHandleInvalid("skip").transform(bad).orderBy("id").select("id", *added).collect()
    assert left == [row for row in kept if row.id not in (5, 9)]


def test_what_cannot_be_done_is_said_when_transform_is_called(rows: Any) -> None:
    model = model_of(Logging("/dev/null"), [JOINED], OutputShape("<f4", ()))
    with pytest.raises(DataError, match="the model's input 'v' is not a column of the DataFrame"):
        model.transform(rows.drop("v"))
    with pytest.raises(DataError, match=r"has a column 'Output' already; .* \(output_cols\)"):
        model.transform(rows.withColumn("Output", F.lit(1)))
    with pytest.raises(DataError, match="has a column 'prediction' already"):
        model.transform(rows.withColumn("prediction", F.lit(1)))
    with pytest.raises(InvalidSettingsError, match="prediction='argmax' does not go with"):
        model.transform(rows, {model.prediction: "argmax"})
    with pytest.raises(InvalidSettingsError, match="nothing to add"):
        model.transform(rows, {model.output_cols: [], model.prediction_col: ""})
    with pytest.raises(InvalidSettingsError, match="was not made by fit"):
        ElasticTorchModel().transform(rows)


def test_feature_columns_may_have_other_names_than_in_training(rows: Any) -> None:
    model = model_of(Logging("/dev/null"), [JOINED], OutputShape("<f4", ()))
    expected = sorted(row.output for row in model.transform(rows).collect())
    renamed = rows.withColumnRenamed("a", "b").withColumnRenamed("v", "w")
    assert sorted(row.output for row in model.setFeatureCols(["b", "w"]).transform(renamed).collect()) == expected
    with pytest.raises(InvalidSettingsError, match=r"\[3\] columns for the model's inputs, which take \[2\]"):
        model.setFeatureCols(["b", "w", "id"]).transform(renamed)


def test_column_names_may_have_dots_and_columns_that_are_not_used_may_share_a_name(rows: Any, sent: str) -> None:
    model = model_of(Logging("/dev/null"), [JOINED], OutputShape("<f4", ()))
    odd = rows.select(F.col("id").alias("the id.of it"), "a", F.col("text").alias("ß"), "v", F.lit(1).alias("ß"))
    made = model.transform(odd)
    assert made.columns == ["the id.of it", "a", "ß", "v", "ß", "output", "prediction"]
    assert sorted(row[5] for row in made.collect()) == sorted(row.output for row in model.transform(rows).collect())
    with pytest.raises(DataError, match="'a' stands for 2 columns"):
        model.transform(rows.select(F.lit(7.0).alias("A"), "a", "v"))
    dotted = model.copy({model.feature_cols: ["a.b", "v"]}).transform(rows.withColumnRenamed("a", "a.b"))
    assert dotted.where("`a.b` = 0.5").first()[dotted.columns.index("output")] == pytest.approx(0.5 + 1 + 5)


# --- saving -------------------------------------------------------------------------------------


def plain(**settings: Any) -> Any:
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model_of(module, [JOINED], OutputShape("<f4", (4,)), rule="argmax", **settings)


def test_a_saved_model_comes_back_and_gives_the_same(rows: Any, tmp_path: Path) -> None:
    model = plain(prediction_col="class", transform_batch_size=7)
    model.save(str(tmp_path / "model"))
    loaded = ElasticTorchModel.load(str(tmp_path / "model"))
    assert loaded.uid == model.uid
    assert (loaded.getPredictionCol(), loaded.getTransformBatchSize()) == ("class", 7)
    assert loaded.history == model.history
    assert loaded.events == model.events
    assert sorted(loaded.transform(rows).collect()) == sorted(model.transform(rows).collect())
    state = load_module(str(tmp_path / "model")).state_dict()
    assert all(torch.equal(state[name], each) for name, each in model.module.state_dict().items())
    with pytest.raises(CheckpointError, match="exists; save to another path"):
        model.save(str(tmp_path / "model"))
    model.write().overwrite().save(str(tmp_path / "model"))


def test_a_module_of_ones_own_class_needs_trust_or_the_module_itself(
    rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "model")
    model = model_of(TwoInputs(), [JOINED, WORD], OutputShape("<f4", (4,)), OutputShape("<f4", ()), rule="argmax")
    PipelineModel([model]).write().overwrite().save(path)
    with pytest.raises(CheckpointError, match=r"architecture in .* can only be loaded by running code"):
        PipelineModel.load(path)
    with trusted_files():
        loaded = PipelineModel.load(path)
    monkeypatch.setenv(TRUST_VARIABLE, f"{tmp_path}/other, file://{tmp_path}/../{tmp_path.name}/model")
    assert len(PipelineModel.load(path).stages) == 1
    model.save(str(tmp_path / "elsewhere"))
    with pytest.raises(CheckpointError, match="architecture in"):
        ElasticTorchModel.load(str(tmp_path / "elsewhere"))
    monkeypatch.delenv(TRUST_VARIABLE)
    expected = sorted(model.transform(rows).collect())
    assert sorted(loaded.transform(rows).collect()) == expected

    model.save(str(tmp_path / "alone"))
    with torch.no_grad():
        other = TwoInputs()
        other.size.weight.zero_()
    filled = ElasticTorchModel.load(str(tmp_path / "alone"), module=other)
    assert sorted(filled.transform(rows).collect()) == expected


def test_what_is_no_saved_model_or_a_damaged_one_is_an_error_of_ours(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ElasticTorchModel.load(str(tmp_path / "none"))
    from pyspark.ml.feature import VectorAssembler

    VectorAssembler(inputCols=["a"]).save(str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="VectorAssembler, not a"):
        ElasticTorchModel.load(str(tmp_path / "other"))
    plain().save(str(tmp_path / "model"))
    weights = tmp_path / "model" / "data" / "weights.pt"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"data/weights.pt cannot be read: .*[Cc]hecksum"):
        ElasticTorchModel.load(str(tmp_path / "model"))
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: data/weights.pt is missing"):
        ElasticTorchModel.load(str(tmp_path / "model"))

"""Columns that `fit` and `transform` take: several as one label, with missing values, sparse vectors, bytes."""

from __future__ import annotations

import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import SparseVector, Vectors
from pyspark.sql import functions as F
from torch import nn

from spark_elastic import DriverCallback, ElasticTorchEstimator, LocalLauncher
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.callbacks import Callback
from tests.unit.ml.torch.estimators import HereEstimator, make_set, settings, weights_of

ROWS = 24


def fit(df: Any, width: int = 2, out: int = 1, **changes: Any) -> Any:
    torch.manual_seed(2)
    net = changes.pop("model", None) or nn.Linear(width, out)
    chosen = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.05), "loss": nn.MSELoss(), "shuffle": False}
    made = {"model": net, **chosen, "label_cols": ["z"], "batch_size": 8, "epochs": 2, "verbose": 0, **changes}
    return HereEstimator(**made).fit(df)


def outputs(model: Any, df: Any, order: str = "id") -> list[Any]:
    return [row.output for row in model.transform(df).orderBy(order).select("output").collect()]


@pytest.fixture(scope="module")
def rows(spark: Any) -> Any:
    generator = np.random.default_rng(3)
    made = [(number, *map(float, generator.normal(size=4))) for number in range(ROWS)]
    return spark.createDataFrame(made, ["id", "x", "y", "z", "w"]).coalesce(1).cache()


def test_inner_list_of_label_cols_is_one_label(rows: Any) -> None:
    joined = rows.withColumn("both", F.array("z", "w"))
    changes = {"feature_cols": ["x", "y"], "out": 2}
    expected = fit(joined, label_cols=["both"], **changes)
    assert weights_of(fit(rows, label_cols=[["z", "w"]], **changes)) == weights_of(expected)
    with pytest.raises(InvalidSettingsError, match=r"2 losses for 1 label_cols \[\['z', 'w'\]\]"):
        fit(rows, label_cols=[["z", "w"]], loss=[nn.MSELoss(), nn.MSELoss()], **changes)


@pytest.fixture(scope="module")
def holes(rows: Any) -> Any:
    """Rows with nulls, NaN and infinity, in scalars, and in arrays, and one without a label."""
    x = F.when(F.col("id") == 2, None).when(F.col("id") == 3, float("nan")).otherwise(F.col("x"))
    y = F.when(F.col("id") == 5, float("inf")).otherwise(F.col("y"))
    df = rows.withColumn("x", x).withColumn("y", y).withColumn("pair", F.array("x", "y"))
    return df.withColumn("z", F.when(F.col("id") != 7, F.col("z")))


@pytest.mark.parametrize("feature_cols", [["x", "y"], ["pair"]], ids=str)
def test_rows_with_missing_values_are_left_out(holes: Any, feature_cols: list[str], caplog: Any) -> None:
    with pytest.raises(DataError, match="have null"):
        fit(holes, feature_cols=feature_cols)
    left = fit(holes, feature_cols=feature_cols, missing="skip")
    assert f"4 of {ROWS} rows have a missing value (null, NaN or infinity) and are left out" in caplog.text
    whole = holes.where(~F.col("id").isin(2, 3, 5, 7))
    assert weights_of(left) == weights_of(fit(whole, feature_cols=feature_cols))
    with pytest.raises(DataError, match="the DataFrame has no rows without a missing value"):
        fit(holes.where("id = 7"), feature_cols=feature_cols, missing="skip")


@pytest.mark.parametrize("feature_cols", [["x", "y"], ["pair"]], ids=str)
def test_a_number_takes_the_place_of_missing_values_in_transform_too(holes: Any, feature_cols: list[str]) -> None:
    labelled = holes.where("id != 7")
    whole = labelled.withColumn("x", F.when(F.col("id").isin(2, 3), -1.5).otherwise(F.col("x")))
    whole = whole.withColumn("y", F.when(F.col("id") == 5, -1.5).otherwise(F.col("y")))
    whole = whole.withColumn("pair", F.array("x", "y"))
    model = fit(labelled, feature_cols=feature_cols, missing=-1.5)
    expected = fit(whole, feature_cols=feature_cols)
    assert weights_of(model) == weights_of(expected)
    assert outputs(model, labelled) == outputs(expected, whole)
    with pytest.raises(DataError, match="column 'z': 1 of"):
        fit(holes, feature_cols=feature_cols, missing=0.0)


def test_integers_with_nulls_get_an_integer_or_become_reals(spark: Any) -> None:
    df = spark.createDataFrame([(0, None, 1.0), (1, 3, 2.0), (2, 4, 3.0)], "id int, n int, z double").coalesce(1)
    for number in (7.0, 0.5):
        whole = df.withColumn("n", F.coalesce(F.col("n").cast("double"), F.lit(number)))
        settings = {"feature_cols": ["n"], "input_dtypes": ["float32"], "width": 1, "input_shapes": [(1,)]}
        assert weights_of(fit(df, missing=number, **settings)) == weights_of(fit(whole, **settings))


def test_missing_is_for_rows_that_are_written(tmp_path: Any) -> None:
    made = HereEstimator(**settings(missing="skip"))
    with pytest.raises(InvalidSettingsError, match="missing: from_dataset_path writes no rows"):
        made.from_dataset_path(make_set(tmp_path))


@pytest.mark.parametrize("width", [6, 5000])
def test_sparse_vectors_are_trained_on_as_dense_ones(spark: Any, width: int) -> None:
    generator = np.random.default_rng(1)
    sparse = [Vectors.sparse(width, {int(at): 1.0 + at for at in generator.choice(6, 2, False)}) for _ in range(ROWS)]
    schema = ["id", "v", "z"]
    df = spark.createDataFrame([(n, each, float(each.values[0])) for n, each in enumerate(sparse)], schema).coalesce(1)
    dense = spark.createDataFrame(
        [(n, Vectors.dense(each.toArray()), float(each.values[0])) for n, each in enumerate(sparse)], schema
    ).coalesce(1)
    assert isinstance(df.first().v, SparseVector)
    changes = {"feature_cols": ["v"], "width": width}
    model, expected = fit(df, **changes), fit(dense, **changes)
    assert weights_of(model) == weights_of(expected)
    assert outputs(model, df) == outputs(expected, dense) == outputs(model, dense)


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(6, 1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        assert pixels.dtype == torch.uint8
        assert pixels.shape[1:] == (2, 3)
        return self.layer(pixels.flatten(1).float() / 255)


def test_bytes_of_one_length_are_uint8_of_their_shape(spark: Any) -> None:
    made = [(n, bytearray((n * 7 + at * 31) % 256 for at in range(6)), float(n % 3)) for n in range(ROWS)]
    df = spark.createDataFrame(made, "id int, pixels binary, z double").coalesce(1)
    numbers = [(n, list(pixels), z) for n, pixels, z in made]
    plain = spark.createDataFrame(numbers, "id int, pixels array<int>, z double").coalesce(1)
    changes = {"model": Pixels(), "feature_cols": ["pixels"], "input_shapes": [(2, 3)]}
    model, expected = fit(df, **changes), fit(plain, **changes, input_dtypes=["uint8"])
    assert weights_of(model) == weights_of(expected)
    assert outputs(model, df) == outputs(expected, plain)
    with pytest.raises(DataError, match=r"'pixels' is binary, .* input_shapes=\[\(height, width\)\] makes uint8"):
        fit(df, **{**changes, "input_shapes": None})
    with pytest.raises(DataError, match=r"6 values.*4 for a shape of"):
        fit(df, **{**changes, "input_shapes": [(2, 2)]})


# --- Ctrl-C -------------------------------------------------------------------------------------------


class Slowly(Callback):
    """Makes an epoch of six batches last three seconds, from the second one on."""

    def on_batch_end(self, run: Any) -> None:
        if run.epoch > 0:
            threading.Event().wait(0.5)


class Presses(DriverCallback):
    """Presses Ctrl-C so many times once the first epoch is over."""

    def __init__(self, times: int) -> None:
        self.times, self.here = times, threading.get_ident()

    def on_epoch_end(self, row: Any) -> None:
        if row["epoch"] == 0:
            threading.Thread(target=self.press).start()

    def press(self) -> None:
        for _ in range(self.times):
            threading.Event().wait(0.7)
            signal.pthread_kill(self.here, signal.SIGINT)


@pytest.mark.parametrize(("times", "launcher"), [(1, LocalLauncher()), (2, LocalLauncher()), (1, None)])
def test_ctrl_c_returns_the_model_of_the_epoch_and_raises_when_pressed_again(
    times: int, launcher: Any, spark: Any, tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    callbacks = [Slowly(), Presses(times)]
    changes = {"epochs": 10**6, "on_interrupt": "return", "callbacks": callbacks}
    made = ElasticTorchEstimator(**settings(**changes, run_options={"launcher": launcher}))
    if times == 2:
        with pytest.raises(KeyboardInterrupt):
            made.from_dataset_path(make_set(tmp_path))
        return
    model = made.from_dataset_path(make_set(tmp_path))
    assert len(model.history) == 2
    two = HereEstimator(**settings(epochs=2)).from_dataset_path(make_set(tmp_path / "again"))
    assert weights_of(model) == pytest.approx(weights_of(two), abs=1e-6)
    assert "the training ends after this epoch; Ctrl-C again ends it now" in capfd.readouterr().err

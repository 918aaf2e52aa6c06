"""What many fits in one process leave of their packed rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

from spark_elastic.data.catalog import DATASETS
from spark_elastic.errors import InvalidSettingsError
from tests.unit.ml.torch.estimators import HereEstimator, settings


def fit(df: Any, store: Path) -> Any:
    given = settings(epochs=1, store=str(store), feature_cols=[f"f{number}" for number in range(6)])
    return HereEstimator(**given, label_cols=["label"]).fit(df)


def rows(spark: Any, number: int = 0) -> Any:
    columns = [(F.col("id") * (number + index)).cast("float").alias(f"f{index}") for index in range(6)]
    return spark.range(200).select(*columns, (F.col("id") % 3).alias("label"))


def left(store: Path) -> int:
    return len(list((store / DATASETS).glob("*/manifest.json")))


def test_a_server_that_retrains_on_and_on_keeps_to_its_limit(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_ELASTIC_ROWS_LIMIT", "20k")  # a set takes 6 to 7 KB, and what is beside it
    counts = []
    for number in range(7):
        fit(rows(spark, number), tmp_path)
        counts.append(left(tmp_path))
    assert counts[0] == 1
    assert 1 <= max(counts) <= 3
    assert counts[-1] == counts[-2]
    fit(rows(spark, 6), tmp_path)
    assert left(tmp_path) == counts[-1], "the newest is found again"
    monkeypatch.setenv("SPARK_ELASTIC_ROWS_LIMIT", "0")
    fit(rows(spark, 6), tmp_path)
    assert left(tmp_path) == 0


def test_a_limit_that_is_none_is_refused_before_the_training_and_not_after_it(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(rows(spark), tmp_path)
    monkeypatch.setenv("SPARK_ELASTIC_ROWS_LIMIT", "20 GB")
    monkeypatch.setattr(HereEstimator, "_run_job", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(InvalidSettingsError, match="must be a size in bytes"):
        fit(rows(spark), tmp_path)


@pytest.mark.parametrize("column", ["rand()", "cast(unix_timestamp(current_timestamp()) as float)"])
def test_what_no_fit_can_find_again_goes_with_its_fit(column: str, spark: Any, tmp_path: Path) -> None:
    fit(rows(spark).withColumn("f0", F.expr(column)), tmp_path)
    assert left(tmp_path) == 0

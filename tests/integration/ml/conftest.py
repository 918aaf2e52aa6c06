"""One local cluster for all tests of a module here, and the digits of scikit-learn as a DataFrame."""

from __future__ import annotations

from typing import Any

import pytest

from spark_elastic.data.catalog import delete_temporary
from tests.integration.clusters import local


@pytest.fixture(scope="module")
def spark() -> Any:
    with local(3, spark_sql_shuffle_partitions="2") as cluster:
        cluster.sc.setLogLevel("OFF")  # tasks fail here on purpose
        yield cluster.spark
        delete_temporary()


@pytest.fixture(scope="module")
def digits(spark: Any) -> Any:
    """(train, test): p0 .. p63 double, digit string."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    rows = [[*map(float, row / 16), f"digit {label}"] for row, label in zip(pixels, labels, strict=True)]
    df = spark.createDataFrame(rows, [*(f"p{index}" for index in range(64)), "digit"]).repartition(2)
    return tuple(part.cache() for part in df.randomSplit([0.75, 0.25], seed=3))

"""A DataFrame of Spark Connect has no JVM on this side: whatever would need one says so, instead of missing `_jdf`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spark_elastic import ElasticTorchEstimator, ElasticTorchModel, materialize
from spark_elastic.errors import SparkConnectNotSupportedError

IN_CONNECT = {"__module__": "pyspark.sql.connect.dataframe", "sparkSession": None, "isStreaming": False}


def estimator() -> ElasticTorchEstimator:
    net = torch.nn.Linear(1, 1)
    return ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda df: estimator().fitMultiple(df, [{}]),
        lambda df: ElasticTorchModel().transform(df),
        lambda df: materialize(df, {"x": "x"}),
    ],
    ids=["fitMultiple", "transform", "materialize"],
)
def test_spark_connect_dataframe_is_refused_with_a_remedy(call: Callable[[Any], Any]) -> None:
    with pytest.raises(SparkConnectNotSupportedError, match="run the driver program on the cluster"):
        call(type("DataFrame", (), IN_CONNECT)())


def test_fit_refuses_a_session_of_spark_connect() -> None:
    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(SparkConnectNotSupportedError, match="run the driver program on the cluster"):
        estimator().fit(type("DataFrame", (), {**IN_CONNECT, "sparkSession": session})())

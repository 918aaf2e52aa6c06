"""Where a deployment trusts files, and what saving says of a later load."""

from __future__ import annotations

import logging
import posixpath
from typing import Any

import pytest
import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator
from spark_elastic.ml.persistence import _encode, plain_and_objects, warn_of_trust
from spark_elastic.ml.trust import TRUST_VARIABLE, granted


def qualified(path: str) -> str:
    """As Hadoop's Path does."""
    scheme, _, rest = path.rpartition("://")
    return f"{scheme or 'file'}:{posixpath.normpath(rest)}"


@pytest.mark.parametrize(
    ("setting", "path", "trusted"),
    [
        (None, "/models/a", False),
        ("", "/models/a", False),
        ("all", "/models/a", True),
        ("/models", "/models/a", True),
        ("/models/", "/models", True),
        ("/models", "file:///models/a", True),
        ("/models", "/models-of-others/a", False),
        ("/models", "/models/../others", False),
        ("/models", "hdfs://models/a", False),
        ("/others, /models", "/models/a", True),
        ("1", "/models/a", False),
        ("ALL", "/models/a", False),
    ],
)
def test_a_deployment_trusts_the_folders_that_it_names(
    setting: Any, path: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is None:
        monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(TRUST_VARIABLE, setting)
    assert granted(path, qualified) == trusted


def saved(caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    caplog.clear()
    estimator = ElasticTorchEstimator(**settings)
    stored, _ = _encode(plain_and_objects(estimator)[1], estimator.TOGETHER, estimator._codec())
    with caplog.at_level(logging.WARNING, "spark_elastic.ml"):
        warn_of_trust(estimator, stored, "/models/a")
    return caplog.text


def test_saving_warns_of_values_that_need_trust(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(2, 1)
    assert saved(caplog, model=net, optimizer=torch.optim.Adam(net.parameters())) == ""
    said = saved(caplog, model=net, optimizer=lambda params: torch.optim.Adam(params))
    assert "loading ElasticTorchEstimator from /models/a will need trust, because of optimizer:" in said
    assert TRUST_VARIABLE in said

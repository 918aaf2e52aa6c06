"""Where a deployment trusts files, and what saving says of a later load."""

from __future__ import annotations

import logging
import posixpath
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator
from spark_elastic.ml.persistence import _encode, plain_and_objects, warn_of_trust
from spark_elastic.ml.saved_folder import StoreFolder
from spark_elastic.runs.trust import TRUST_VARIABLE, granted


def qualified(path: str) -> str:
    """As Hadoop's Path does."""
    scheme, slashes, rest = path.rpartition("://")
    return f"{scheme or 'file'}:{slashes[1:]}{posixpath.normpath(rest)}"


@pytest.mark.parametrize(
    ("setting", "path", "trusted"),
    [
        (None, "/models/a", False),
        ("", "/models/a", False),
        ("all", "/models/a", True),
        ("/models", "/models/a", True),
        ("/models", "file:///models/a", True),
        ("/models", "/models-of-others/a", False),
        ("/models", "/models/../others", False),
        ("/models", "hdfs://models/a", False),
        ("/others, /models", "/models/a", True),
        ("ALL", "/models/a", False),
        ("/models", "/models/./b//a", True),
        ("/models", "/models/%2e%2e/others", False),
        ("s3://b/models", "s3://b/models/a", True),
        ("s3://b/models/", "S3://b//models/./a", True),
        ("s3://b/models", "s3://b/models/../others/a", False),
        ("s3://b/models", "s3://b/models/%2e%2e/others", False),
        ("s3://b/models", "s3://b/models/%252e%252e/others", False),
        ("s3://b/models", "s3://b/models2/a", False),
        ("s3://b/models", "s3://b/models?/a", False),
        ("s3://b/models", "s3://b/models/a?region=x", True),
        ("s3://b", "s3://b.others/a", False),
        ("hdfs:///models", "hdfs://models/a", False),
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
    assert granted(path, str) == trusted, "a filesystem that only this process opens"


def test_query_with_folders_in_it_does_not_lead_into_a_trusted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, "https://host/models")
    assert not granted("https://host/others?x/../models/a", str)


def test_link_out_of_a_trusted_folder_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models", "others"):
        (tmp_path / name / "a").mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to(tmp_path / "others")
    (tmp_path / "also_models").symlink_to(tmp_path / "models")
    monkeypatch.setenv(TRUST_VARIABLE, str(tmp_path / "also_models"))
    assert granted(str(tmp_path / "models" / "a"), qualified)
    assert granted(f"file:{tmp_path}/also_models/a", str)
    assert not granted(str(tmp_path / "models" / "link" / "a"), qualified)


def saved(caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    caplog.clear()
    estimator = ElasticTorchEstimator(**settings)
    stored, _ = _encode(plain_and_objects(estimator)[1], estimator._saved_together, estimator._codec())
    with caplog.at_level(logging.WARNING, "spark_elastic.ml"):
        warn_of_trust(estimator, stored, (), "/models/a")
    return caplog.text


def test_saving_warns_of_values_that_need_trust(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Linear(2, 1)
    assert saved(caplog, model=net, optimizer=torch.optim.Adam(net.parameters())) == ""
    said = saved(caplog, model=net, optimizer=lambda params: torch.optim.Adam(params))
    assert "loading ElasticTorchEstimator from /models/a will need trust, because of optimizer:" in said
    assert TRUST_VARIABLE in said


def test_folders_that_messages_show_alike_are_not_taken_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, "memory://models/token=a")
    folder = StoreFolder(None, "memory://models/token=b")
    assert granted("memory://models/token=a/x", folder.qualified)
    assert not granted("memory://models/token=b/x", folder.qualified)

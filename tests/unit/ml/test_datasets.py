"""The end of a fit: cleaning up rows never raises, so that no trained model is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spark_elastic.ml.datasets import give_back, remove_unless_used


class Away:
    """A store that answers nothing, with an error of its own package."""

    url = "s3://away/set"

    def __getattr__(self, name):
        raise RuntimeError("HTTP 503")


@pytest.mark.parametrize("end", [give_back, remove_unless_used])
def test_unreachable_store_is_logged_and_raises_nothing(end, caplog, monkeypatch):
    monkeypatch.setenv("SPARK_ELASTIC_ROWS_LIMIT", "rubbish")
    end(SimpleNamespace(store=Away()))
    assert "s3://away/set" in caplog.text

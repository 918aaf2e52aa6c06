"""Settings in words: no addresses, no credentials, nothing that changes from run to run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.data.store import Store
from spark_elastic.reporting.descriptions import describe, describe_settings


class Unfriendly:
    def __repr__(self) -> str:
        raise OSError("gone")


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (3, 3),
        (np.float32(0.5), 0.5),
        ("text", "text"),
        (Path("/data"), "/data"),
        (["a", 1], "['a', 1]"),
        (nn.CrossEntropyLoss(), "CrossEntropyLoss()"),
        (torch.optim.Adam, "torch.optim.adam.Adam"),
        (functools.partial(torch.optim.SGD, lr=0.1), "torch.optim.sgd.SGD(lr=0.1)"),
        (len, "len"),
        ({"f": np.mean}, "{'f': 'numpy.mean'}"),
        ("x" * 7000, "x" * 5997 + "..."),
    ],
)
def test_value_is_described_in_few_words(value: Any, described: Any) -> None:
    assert describe(value) == described


@pytest.mark.parametrize("value", [object(), Unfriendly(), lambda x: x, [object()], {"a": object()}])
def test_no_address_of_an_object(value: Any) -> None:
    assert "0x" not in describe(value)


def test_keys_in_an_address_are_not_described() -> None:
    bucket = Store("s3://AKIA:hunter2@bucket/x", "bucket/x", filesystem=object())
    described = describe_settings(
        {
            "store": bucket,
            "run_options": {"output_dir": bucket.address, "api_token": "hunter3", "n": 1},
            "path": Path("/a@b"),
            "input_dtypes": {"token_ids": "int64"},
            "loss": functools.partial(len, password="hunter4"),
        }
    )
    assert described == {
        "store": "s3://***@bucket/x",
        "run_options": "{'output_dir': 's3://***@bucket/x', 'api_token': ***, 'n': 1}",
        "path": "/a@b",
        "input_dtypes": "{'token_ids': 'int64'}",
        "loss": "len(password=***)",
    }

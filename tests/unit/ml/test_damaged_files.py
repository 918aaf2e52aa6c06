"""Damaged files of saved models and weights raise a typed error that names the file, whatever is damaged in them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.errors import CheckpointError
from spark_elastic.ml import persistence
from spark_elastic.ml.torch import serialization as of_torch
from tests.unit.ml.torch.estimators import HereEstimator, estimator, make_set


def damaged(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield variants of a file: cut off, with flipped bits, with bytes removed, and with a part overwritten."""
    draw = random.Random(seed)
    for number in range(count):
        at = draw.randrange(len(content))
        changed = bytearray(content)
        if number % 4 == 0:
            del changed[at:]
        elif number % 4 == 1:
            changed[at] ^= 1 << draw.randrange(8)
        elif number % 4 == 2:
            del changed[at : at + draw.randrange(1, 40)]
        else:
            changed[at : at + 16] = draw.randbytes(16)
        yield bytes(changed)


def load_torch(content: bytes) -> None:
    of_torch.fill(nn.Linear(3, 2), of_torch.from_bytes(content))


WEIGHTS = of_torch.weights_to_bytes(nn.Linear(3, 2))
OBJECTS = of_torch.dumps({"model": nn.Sequential(nn.Linear(3, 2), nn.ReLU()), "loss": nn.MSELoss()})


def keras_arrays() -> tuple[bytes, Callable[[bytes], Any]]:
    of_keras = pytest.importorskip("spark_elastic.ml.keras.serialization")
    arrays = {"0:dense/kernel": np.ones((3, 2), np.float32), "1:dense/bias": np.zeros(2, np.float16)}
    return of_keras.arrays_to_bytes(arrays), of_keras.arrays_from_bytes


@pytest.mark.parametrize(
    "kind",
    [lambda: (WEIGHTS, load_torch), lambda: (OBJECTS, of_torch.loads), keras_arrays],
    ids=["torch weights", "torch objects", "keras arrays"],
)
def test_damaged_bytes_raise_a_checkpoint_error_or_none(kind: Callable[[], Any]) -> None:
    content, load = kind()
    refused = 0
    for each in damaged(content, 400):
        try:
            load(each)
        except CheckpointError:
            refused += 1
    assert refused > 200, "most damage is noticed without a checksum, too"


class Folder:
    """A saved stage in memory."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.document: dict[str, Any] = {}

    def exists(self) -> bool:
        return bool(self.document)

    def qualified(self, path: str) -> str:
        return path

    def write(self, folder: str, files: dict[str, bytes]) -> None:
        self.files = dict(files)

    def write_metadata(self, instance: Any, extra: dict[str, Any], settings: dict[str, Any]) -> None:
        kind = type(instance)
        name = f"{kind.__module__}.{kind.__name__}"
        self.document = json.loads(json.dumps({"class": name, "uid": instance.uid, "paramMap": settings, **extra}))

    def metadata(self) -> dict[str, Any]:
        return self.document

    def read(self, folder: str, names: list[str]) -> dict[str, bytes]:
        return {name: self.files[name] for name in names}


def complaint(reader: Any, path: str) -> str | None:
    """Return what a load says of damage; None if it loads."""
    try:
        reader.load(path)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("checksums", [True, False], ids=["as saved now", "as 0.2.0 saved"])
def test_damaged_model_is_refused_with_the_name_of_the_file(
    checksums: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = estimator(epochs=1).from_dataset_path(make_set(tmp_path / "set"))
    folder = Folder()
    monkeypatch.setattr(persistence, "saved_folder", lambda *_: folder)
    model.write().session(object()).saveImpl("/models/one")
    about = folder.document["sparkElastic"]
    assert sorted(about["checksums"]) == about["files"]
    if not checksums:
        del about["checksums"]
    reader = type(model).read().session(object())
    whole = dict(folder.files)
    weights = reader.load("/models/one").module.state_dict()
    assert all(torch.equal(weights[name], each) for name, each in model.module.state_dict().items())
    for name, content in whole.items():
        for each in damaged(content, 40):
            folder.files = {**whole, name: each}
            said = complaint(reader, "/models/one")
            assert said is None or ("/models/one" in said and name in said), said
            assert said is not None or not checksums or each == content, f"{name} was loaded although it is damaged"


def test_checksums_are_those_of_the_files_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder()
    monkeypatch.setattr(persistence, "saved_folder", lambda *_: folder)
    made: HereEstimator = estimator(epochs=1)
    made.write().session(object()).saveImpl("/one")
    folder.document["sparkElastic"]["checksums"] = {"model-optimizer.pt": "x"}
    with pytest.raises(CheckpointError, match=r"metadata, model-optimizer\.pt is 'x'"):
        type(made).read().session(object()).load("/one")

"""Damaged files of saved models and weights raise a typed error that names the file, whatever is damaged in them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spark_elastic.errors import CheckpointError
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


# as on Spark Connect, where this process reads the files itself: no JVM is needed
SESSION = type("Session", (), {"__module__": "pyspark.sql.connect.session", "version": "4.0"})()


def changed_metadata(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    (file,) = (folder / "metadata").glob("part-*")
    document = json.loads(file.read_text())
    change(document["sparkElastic"])
    file.write_text(json.dumps(document))


def complaint(reader: Any, path: str) -> str | None:
    """Return what a load says of damage; None if it loads."""
    try:
        reader.load(path)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("checksums", [True, False], ids=["as saved now", "as 0.2.0 saved"])
def test_damaged_model_is_refused_with_the_name_of_the_file(checksums: bool, tmp_path: Path) -> None:
    model = estimator(epochs=1).from_dataset_path(make_set(tmp_path / "set"))
    folder = tmp_path / "model"
    model.write().session(SESSION).save(str(folder))
    reader = type(model).read().session(SESSION)
    if not checksums:
        changed_metadata(folder, lambda about: about.pop("checksums"))
    weights = reader.load(str(folder)).module.state_dict()
    assert all(torch.equal(weights[name], each) for name, each in model.module.state_dict().items())
    (folder / "data" / "weights.safetensors").unlink(missing_ok=True)  # for other programs: a load does not read it
    for file in (folder / "data").iterdir():
        whole = file.read_bytes()
        for each in damaged(whole, 40):
            file.write_bytes(each)
            said = complaint(reader, str(folder))
            assert said is None or (str(folder) in said and file.name in said), said
            assert said is not None or not checksums or each == whole, f"{file.name} was loaded although it is damaged"
        file.write_bytes(whole)


def test_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    made: HereEstimator = estimator(epochs=1)
    made.write().session(SESSION).save(str(tmp_path / "one"))
    changed_metadata(tmp_path / "one", lambda about: about.update(checksums={"model-optimizer.pt": "x"}))
    with pytest.raises(CheckpointError, match=r"metadata, model-optimizer\.pt is 'x'"):
        type(made).read().session(SESSION).load(str(tmp_path / "one"))

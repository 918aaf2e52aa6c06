"""Hostile manifests, checkpoint metadata and saved-model metadata, opened as a user opens them.

A document is a valid one with some values replaced, dropped, added or nested deep, or with some bytes changed. Most
have a right checksum: it finds damage, and keeps nobody from writing what they like. Other files stay as they were.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.manifest import CHECKSUM, MANIFEST_NAME, TensorField
from spark_elastic.data.store import Store
from spark_elastic.errors import SparkElasticError
from spark_elastic.ml.added_columns import OutputShape
from spark_elastic.ml.fitted import Fitted
from spark_elastic.ml.torch.model import ElasticTorchModel
from spark_elastic.reporting.history import History
from spark_elastic.runs.checkpoints import MANIFEST, CheckpointFacts, Checkpoints, Contents
from tests.storms.hostile_judge import Findings, usage

_JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "\ud800",
        "a\0b",
        "../x",
        "/etc/passwd",
        ".",
        "a/../../b",
        "x" * 300,
        "é" * 5000,
        "<f4",
        "O",
        "V9999999",
    ),
    *([], {}, [[]], [None], [2**62, 2**62], [-1], [0] * 100, {"": 1}, {"name": "x"}, ["x", "x"]),
)
_DEEP = "deep nesting goes here"


# --- mutations ----------------------------------------------------------------------------------------


def _containers(node: Any) -> Iterator[Any]:
    """Yield all objects and lists of a document that are not empty."""
    children = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    if children:
        yield node
    for child in children:
        yield from _containers(child)


def _mutate(document: Any, rng: random.Random) -> None:
    """Change one value somewhere in the document."""
    place = rng.choice(list(_containers(document)))
    key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    what = rng.randrange(8)
    if what <= 3:
        place[key] = copy.deepcopy(rng.choice(_JUNK))
    elif what == 4:
        del place[key]
    elif what == 5 and isinstance(place, dict):
        place[rng.choice(("more", "", "\ud800", "a\0b", "../x"))] = copy.deepcopy(rng.choice(_JUNK))
    elif what == 5:
        place.append(copy.deepcopy(rng.choice((place[key], *_JUNK))))
    elif what == 6:
        other = rng.choice(list(_containers(document)))
        place[key] = json.loads(json.dumps(other))
    else:
        place[key] = _DEEP


def _deep(rng: random.Random) -> str:
    depth = rng.choice((50, 900, 970, 980, 990, 995, 1000, 5000))
    return rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))


def hostile(valid: bytes, rng: random.Random, sealed: bool) -> bytes:
    """Return a mutation of a document, with its checksum made right again if it has one (`sealed`) most of the time."""
    document = json.loads(valid)
    document.pop(CHECKSUM, None)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if any(True for _ in _containers(document)):
            _mutate(document, rng)
    text = json.dumps(document).replace(f'"{_DEEP}"', _deep(rng))
    if sealed and rng.random() < 0.9:
        text = _seal(text, rng)
    data = text.encode()
    if rng.random() < 0.15:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(changed))
            changed[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        data = bytes(changed)[: rng.choice((len(changed), len(changed), rng.randint(0, len(changed))))]
    return data


def _seal(text: str, rng: random.Random) -> str:
    """Add the checksum, however deep the document is."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            return text
        plain = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    finally:
        sys.setrecursionlimit(limit)
    return f'{text[:-1]}, "{CHECKSUM}": {zlib.crc32(plain)}}}'


# --- what is attacked -----------------------------------------------------------------------------------


@dataclass
class Target:
    """A kind of file: a valid one, and the calls that open what it belongs to."""

    file: Path
    open: Callable[[], object]
    sealed: bool = True


@contextlib.contextmanager
def targets() -> Iterator[dict[str, Target]]:
    """Write a valid dataset, checkpoint and model, in memory if this machine has such a folder."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as folder:
        yield {
            "manifests": _dataset(Path(folder)),
            "checkpoints": _checkpoint(Path(folder)),
            "models": _model(Path(folder)),
        }


def _dataset(folder: Path) -> Target:
    texts = ["one", "two", "", "four"] * 5
    values = {"x": np.arange(80, dtype="<f4").reshape(20, 4), "y": np.arange(20), "text": texts}
    pack(values, folder / "set")

    def use() -> None:
        dataset = Dataset.open(folder / "set")
        dataset.verify()
        for split in dataset.splits:
            with dataset.reader(split, batch_size=8) as reader:
                for _ in reader.epoch(0):
                    pass

    return Target(folder / "set" / MANIFEST_NAME, use)


def _checkpoint(folder: Path) -> Target:
    store = Store.create(folder / "checkpoints")
    facts = CheckpointFacts("000000000007", 7, 1, 20, ("loss",), 3)
    document = {"settings": {"rows": 20}, "at": {"epoch": 1}, "callbacks": [{"class": "x", "state": {}}]}
    Checkpoints(store).write(Contents(facts, document, {"model.pt": b"weights", "optimizer.pt": b"moments"}))

    def use() -> None:
        checkpoints = Checkpoints(store)
        checkpoints.complete()
        with contextlib.suppress(SparkElasticError):
            checkpoints.latest()
        checkpoints.load(facts.name)

    return Target(folder / "checkpoints" / facts.name / MANIFEST, use)


def _model(folder: Path) -> Target:
    # a session that cannot read files for this process, as on Spark Connect: no JVM is needed
    session = type("Session", (), {"__module__": "pyspark.sql.connect.session", "version": "4.0"})()
    model = ElasticTorchModel(output_cols=["logits"], output_type="vector", probability_col="probability")
    rows, outputs = TensorField("features_0", ("x",), "<f4", (4,)), OutputShape("<f4", (3,))
    fitted = Fitted((rows,), (outputs,), "argmax", History([{"epoch": 0, "loss": 1.1}]), ({"kind": "finished"},))
    model._attach(torch.nn.Sequential(torch.nn.Linear(4, 3)), fitted)
    model.write().session(session).save(str(folder / "model"))
    (file,) = (folder / "model/metadata").glob("part-*")
    return Target(file, lambda: ElasticTorchModel.read().session(session).load(str(folder / "model")), sealed=False)


# --- the attack -----------------------------------------------------------------------------------------


def attack_documents(count: int, seed: int) -> dict[str, Findings]:
    """Open `count` hostile files, the same number of each kind."""
    with targets() as found:
        return {kind: _attack(target, count // len(found), seed) for kind, target in found.items()}


def _attack(target: Target, count: int, seed: int) -> Findings:
    valid, findings = target.file.read_bytes(), Findings()
    target.open()
    rng = random.Random(seed)
    before = (0.0, 0, 0)
    for number in range(count):
        if number == min(500, count // 2):  # what is allocated once is no growth
            before = usage()
        target.file.write_bytes(hostile(valid, rng, target.sealed))
        findings.judge(target.open)
    findings.note_growth(before, usage())
    target.file.write_bytes(valid)
    target.open()
    return findings

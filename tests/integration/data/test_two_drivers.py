"""Two drivers that write one dataset at the same time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spark_elastic.data.catalog import DATASETS
from spark_elastic.data.store import Store

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys, time
from pathlib import Path
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from spark_elastic.data.materialization import materialize
from spark_elastic.errors import SparkElasticError

folder, name = Path(sys.argv[1]), sys.argv[2]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")

def write(dataset_id, validation):
    names = [f"{dataset_id}-{each}" for each in ("first", "second")]

    @F.udf("long")
    def meet(x):
        (folder / f"{dataset_id}-{name}").touch()
        until = time.monotonic() + 120
        while not all((folder / each).exists() for each in names) and time.monotonic() < until:
            time.sleep(0.01)
        return x

    frame = spark.range(0, 50, 1, 1).select(meet("id").alias("x"))
    settings = {"dataset_id": dataset_id, "validation": validation, "verbose": 0}
    try:
        dataset = materialize(frame, {"x": "x"}, store=folder / "store", **settings)
        dataset.verify()
        return {"rows": dataset.rows(), "key": dataset.manifest.key, "files": sorted(dataset.manifest.files)}
    except SparkElasticError as error:
        return {"error": str(error)}

print(json.dumps([write("alike", None), write("different", None if name == "first" else 0.5)]))
spark.stop()
"""


@pytest.mark.nightly
def test_two_drivers_that_write_one_dataset_at_the_same_time(tmp_path: Path) -> None:
    """Both read the rows of the one that is done first; with other settings, the slower one is told."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), name],
            cwd=ROOT,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("first", "second")
    ]
    said = [each.communicate(timeout=240) for each in programs]
    assert all(out for out, _ in said), [error[-2000:] for _, error in said]
    (first, one), (second, other) = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert first == second, (first, second)
    assert "error" not in first, first
    assert first["rows"] == 50
    left = {entry.path for entry in Store.create(tmp_path / "store" / DATASETS / "alike").list(recursive=True)}
    assert {each for each in left if each.endswith(".rows")} == set(first["files"])
    errors = [each["error"] for each in (one, other) if "error" in each]
    assert len(errors) == 1, (one, other)
    assert re.search(r"'different' .* was written with other settings: validation=", errors[0]), errors

"""A fit whose disk is gone for a while. It goes on, and so do its checkpoints."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_elastic import LocalLauncher
from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoints import Checkpoints
from tests.integration.processes import wait_until
from tests.integration.spark.diary import Diary
from tests.integration.spark.fits import Fit

pytestmark = pytest.mark.nightly

DISK = "size=6m"
STEPS = 100
"""Steps that have to be made while the disk fails: ten epochs, two of which end with a checkpoint."""
WAIT_S = 90.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    at = tmp_path / "disk"
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "none", str(at)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


@contextlib.contextmanager
def gone(disk: Path) -> Iterator[None]:
    """Have the disk's folder lead nowhere, as that of a mount whose server is away."""
    away = disk.with_name("away")
    away.mkdir()
    subprocess.run(["mount", "--bind", str(disk), str(away)], check=True)
    subprocess.run(["umount", "-l", str(disk)], check=True)
    disk.rmdir()
    disk.touch()  # no folder can be made here meanwhile
    try:
        yield
    finally:
        disk.unlink()
        disk.mkdir()
        subprocess.run(["mount", "--bind", str(away), str(disk)], check=True)
        subprocess.run(["umount", "-l", str(away)], check=True)


def steps_of(diary: Diary) -> int:
    return max((entry["step"] for entry in diary.read() if entry["what"] == "applied"), default=0)


def epochs_of(runs: Path) -> list[int]:
    """Return the epochs of the checkpoints that are complete."""
    folders = [each for each in runs.iterdir() if each.is_dir()] if runs.is_dir() else []
    found: list[int] = []
    for folder in folders:
        found += [facts.epoch for facts in Checkpoints(Store.create(folder / "checkpoints")).complete()]
    return sorted(found)


def test_fit_goes_on_while_the_disk_of_its_checkpoints_is_gone(spark: Any, tmp_path: Path, disk: Path) -> None:
    diary, runs = Diary(tmp_path), disk / "runs"
    fit = Fit(
        "torch",
        spark,
        tmp_path,
        num_proc=2,
        checkpoint_dir=str(runs),
        run_id="one",
        run_options={"launcher": LocalLauncher(preimport=("torch",))},
    )
    try:
        wait_until(lambda: fit.done() or len(epochs_of(runs)) > 0, WAIT_S, "a checkpoint")
        with gone(disk):
            begun = steps_of(diary)
            wait_until(lambda: fit.done() or steps_of(diary) > begun + STEPS, WAIT_S, "steps")
            assert not fit.done(), fit.status()
        newest = max(epochs_of(runs))
        wait_until(lambda: fit.done() or max(epochs_of(runs)) > newest + 5, WAIT_S, "new checkpoints")
    finally:
        fit.cancel()
    fit.result(60)
    assert fit.problems() == []
    assert os.listdir(tmp_path / "disk")

"""The run folder of a call, before any worker is started."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from spark_elastic import LocalLauncher
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.jobs.run_folder import open_run
from spark_elastic.jobs.settings import RunCall


def call(folder: Path, **settings: Any) -> RunCall:
    return RunCall(print, num_proc=1, launcher=LocalLauncher(), checkpoint_dir=folder, **settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"run_id": "one"}, "run_id='one' without checkpoint_dir"),
        ({"run_id": "../one", "checkpoint_dir": "runs"}, "run_id must be letters"),
        ({"checkpoint_dir": ""}, "checkpoint_dir must be a path, a URI or a Store, not ''"),
        ({"checkpoint_dir": 5}, "checkpoint_dir must be a path, a URI or a Store, not 5"),
    ],
)
def test_a_run_id_that_names_nothing_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSettingsError, match=why):
        RunCall(print, **settings)


def test_a_run_without_a_name_gets_one_which_is_said(tmp_path: Path) -> None:
    with contextlib.ExitStack() as undo:
        folders = [open_run(call(tmp_path), None, undo) for _ in range(2)]
    assert folders[0].run_id != folders[1].run_id
    assert folders[0].in_words().endswith(f"give the same checkpoint_dir and run_id={folders[0].run_id!r}")
    assert folders[0].resumable().startswith("; nothing was committed in")


def test_the_folder_of_an_estimator_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text(json.dumps({"rows": 3}))
    with contextlib.ExitStack() as undo, pytest.raises(CheckpointError, match="of an estimator; choose another run_id"):
        open_run(call(tmp_path, run_id="one"), None, undo)

"""The folder of a run below `checkpoint_dir`: its name, and the file that makes it an estimator's."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from spark_elastic import clock
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError, StoreError

IDENTITY_FILE = "run.json"
"""In the folders of estimators: the facts that must be equal for a training to resume from the checkpoints beside."""


def check_run_id(run_id: str | None, checkpoint_dir: Any) -> None:
    """Raise `InvalidSettingsError` for a `run_id` without `checkpoint_dir`."""
    if run_id is not None and checkpoint_dir is None:
        raise InvalidSettingsError(
            f"run_id={run_id!r} without checkpoint_dir: there is nothing to resume from; set both"
        )


def new_run_id() -> str:
    return f"{clock.wall():.0f}-{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def storage_errors(runs: Store) -> Iterator[None]:
    """Raise `StoreError` if the block, which opens a run below `checkpoint_dir`, raises `OSError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"checkpoint_dir {runs.url} cannot be used: {error}", url=runs.url) from error

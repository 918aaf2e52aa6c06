"""The run folder of a training: where it is, which driver holds it, and which checkpoint in it a fit resumes from."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from spark_elastic.data.catalog import ORPHAN_AGE_S, is_leased, leased
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError
from spark_elastic.ml.fingerprint import digest
from spark_elastic.redaction import redacted
from spark_elastic.runs.checkpoints import CHECKPOINTS, Checkpoints
from spark_elastic.runs.folder import IDENTITY_FILE, storage_errors
from spark_elastic.runs.lease import OWNERS, RunLease, opened_run

log = logging.getLogger("spark_elastic.ml")

_RUN_FILES = re.compile(r"(run\.json|history\.json|model\.\w+|checkpoints/.*|leases/.*|.*\.partial)$")
_TRANSIENT_NAME = re.compile(r"[0-9a-f]{32}$")


@contextlib.contextmanager
def leased_if_possible(folder: Store) -> Iterator[None]:
    """Keep clean-ups of other processes away from the folder, if a lease can be written there."""
    lease = contextlib.ExitStack()
    try:
        lease.enter_context(leased(folder))
    except Exception as error:  # each filesystem has its own errors
        log.info("no lease could be written to %s, so others may remove it: %s", folder.url, redacted(error))
    try:
        yield
    finally:
        try:
            lease.close()
        except Exception as error:  # it expires by itself, and is no reason to lose what was trained
            log.info("the lease on %s could not be given back: %s", folder.url, redacted(error))


@contextlib.contextmanager
def transient_run(runs: Store) -> Iterator[Store]:
    """Make a folder below `runs`, and remove it when the block ends."""
    with contextlib.suppress(Exception):  # left-overs of other drivers are no reason not to train
        collect_runs(runs)
    run = runs.sub(uuid.uuid4().hex)
    try:
        with leased_if_possible(run):
            yield run
    finally:
        with contextlib.suppress(Exception):  # a store that fails must not hide the error of the block
            run.delete()


def collect_runs(runs: Store) -> list[str]:
    """Remove folders of `transient_run` with an expired lease and old files alone; return their names."""
    removed = []
    found = [entry for entry in runs.list() if entry.is_dir and _TRANSIENT_NAME.match(entry.path)]
    now = runs.now() if found else 0.0
    for entry in found:
        run = runs.sub(entry.path)
        files = [file for file in run.list(recursive=True) if not file.is_dir]
        newest = max((file.modified_s for file in files), default=entry.modified_s)
        if newest < now - ORPHAN_AGE_S and all(_RUN_FILES.match(file.path) for file in files) and not is_leased(run):
            run.delete()
            removed.append(entry.path)
    return removed


@contextlib.contextmanager
def durable_run(
    runs: Store, name: str, identity: Mapping[str, Any], run_id: str | None, resume: bool
) -> Iterator[tuple[RunLease, str | None]]:
    """Acquire the folder `name` below `runs`; yields its lease, and the name of a checkpoint in it to resume from.

    `identity` are the facts that must be equal to resume; without `resume` earlier checkpoints are deleted. Raises
    `RunTakenError` if another driver has the run, `CheckpointError` for checkpoints that are damaged or of another
    training, and `StoreError` if the folder cannot be used.
    """
    run = runs.sub(name)
    with contextlib.ExitStack() as exits:
        with storage_errors(runs):
            lease = exits.enter_context(opened_run(run, Checkpoints(run.sub(CHECKPOINTS)).newest_token()))
            if not resume and (run.exists(IDENTITY_FILE) or run.exists(CHECKPOINTS)):
                clear(run, lease)
            latest = Checkpoints(run.sub(CHECKPOINTS)).latest()
            if latest is not None:
                _check_identity(run, identity, run_id)
            else:
                run.write_bytes(IDENTITY_FILE, json.dumps(identity, indent=1).encode(), check=lease.check)
        yield lease, None if latest is None else latest.name


def identity_of_rows(dataset: Dataset, seed: int, shuffle: bool) -> dict[str, Any]:
    """Return the facts about the rows and their order that must be equal to resume from a checkpoint."""
    return {
        "rows": dataset.rows("train"),
        "tensors": [[each.name, list(each.columns), each.dtype, list(each.shape)] for each in dataset.layout.fields],
        "seed": seed,
        "shuffle": shuffle,
        "shards": {
            name: digest([[each.rows, each.crc32, each.sidecar_crc32] for each in shards], 32)
            for name, shards in dataset.manifest.splits.items()
        },
    }


def _check_identity(run: Store, identity: Mapping[str, Any], run_id: str | None) -> None:
    """Raise `CheckpointError` if the run's checkpoints are of another training, or `run.json` is damaged."""
    try:
        found = json.loads(run.read_bytes(IDENTITY_FILE)) if run.exists(IDENTITY_FILE) else {}
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{run.url}/{IDENTITY_FILE}, which describes the training of the checkpoints beside it, is damaged: "
            f"{error}. Choose another run_id, or set resume=False to delete them and start over"
        ) from error
    different = [name for name in {**identity, **found} if found.get(name) != identity.get(name)]
    if different[:1] == ["shards"]:
        raise CheckpointError(
            f"run_id={run_id!r} has checkpoints of other rows: the present rows "
            "differ in values, in text or arrays of variable length, or in their order, which a checkpoint needs "
            "to know the rows of its epoch that were used. Train on the dataset that was written then (dataset_id, "
            "from_dataset_path), choose another run_id, or set resume=False to replace the checkpoints"
        )
    if different:
        name = different[0]
        was, now = repr(found.get(name)), repr(identity.get(name))
        differ = (at for at, (a, b) in enumerate(zip(was, now, strict=False)) if a != b)
        at = max(0, next(differ, 0) - 40)  # the repr of a model is long, and begins equal
        was, now = (("..." if at else "") + each[at : at + 80] for each in (was, now))
        raise CheckpointError(
            f"run_id={run_id!r} has checkpoints of another training: {name} was {was} and is {now} now. Choose another "
            "run_id, or set resume=False to replace them"
        )


def clear(run: Store, lease: RunLease) -> None:
    """Delete all but the leases. Raises `RunTakenError` if another driver takes over the run between two deletions."""
    for entry in [*run.list(CHECKPOINTS), *run.list()]:
        if entry.path != OWNERS:
            lease.check()
            run.delete(entry.path)

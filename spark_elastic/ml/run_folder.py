"""The folder of an estimator's training: where it is, whose it is, and what a fit goes on from there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_elastic import clock
from spark_elastic.data.catalog import ORPHAN_AGE_S, is_leased, leased
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.sharing import ensure_shared
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, StoreError
from spark_elastic.ml.checkpoints import Checkpoints
from spark_elastic.ml.datasets import SharedDatasets
from spark_elastic.ml.fingerprint import described, digest
from spark_elastic.ml.run_lease import OWNERS, held_run
from spark_elastic.ml.shared_params import ClusterParams, StorageParams
from spark_elastic.ml.training.spec import CHECKPOINTS

if TYPE_CHECKING:
    from spark_elastic.data.store import Store
    from spark_elastic.ml.training.spec import CheckpointPlan, Training

# Whether a training's folder has room for what the training will write there.


def check_room(run: Store, model_nbytes: int, training: Training) -> None:
    """Compare what a local store has free with the model and the checkpoints that are kept, each as large as the model.

    Checkpoints hold the optimizer's values too, so this is the least that will be written; what is there already of
    this run's checkpoints makes room as they are replaced. Object stores and HDFS are not asked.

    Raises: StoreError: it cannot be enough.
    """
    if not run.is_local:
        return
    count = 0 if training.checkpoints is None else checkpoints_at_once(training.checkpoints, training.epochs)
    needed = model_nbytes * (1 + count)
    there = sum(entry.nbytes for entry in run.list(CHECKPOINTS, recursive=True))
    disk = shutil.disk_usage(_existing(run.local_path()))
    if disk.total and disk.free + there < needed:
        kept = f" and {count} checkpoints of at least as much, the one being written included" if count else ""
        raise StoreError(
            f"{run.url} has {_in_words(disk.free)} free, and the training will write at least {_in_words(needed)} "
            f"there: the model of {_in_words(model_nbytes)}{kept}. Make room, "
            + ("lower keep_checkpoints, or give another checkpoint_dir" if count else "or give another store"),
            url=run.url,
        )


def checkpoints_at_once(plan: CheckpointPlan, epochs: int) -> int:
    """Return how many lie in the folder at a time, at most."""
    count = plan.keep + 1 + (plan.best_of is not None)
    if plan.every_steps is None and plan.every_seconds is None:
        count = min(count, 0 if plan.every_epochs is None else -(-epochs // plan.every_epochs))
    return count


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


def _in_words(nbytes: int) -> str:
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.1f} {unit}"
    return f"{nbytes} bytes"


# Folders of trainings that are there for as long as their fit, and what is left of them if the driver was killed.

log = logging.getLogger("spark_elastic.ml")

_OURS = re.compile(r"(run\.json|history\.json|model\.\w+|checkpoints/.*|leases/.*|.*\.partial)$")
_ID = re.compile(r"[0-9a-f]{32}$")


@contextlib.contextmanager
def leased_if_possible(folder: Store) -> Iterator[None]:
    """While the block runs nobody's clean-up takes the folder. Where nothing can be written it goes without."""
    lease = contextlib.ExitStack()
    try:
        lease.enter_context(leased(folder))
    except Exception as error:  # each filesystem has errors of its own
        log.info("no lease on %s, which others may remove: %s", folder.url, error)
    try:
        yield
    finally:
        try:
            lease.close()
        except Exception as error:  # it runs out by itself, and is no reason to lose what was trained
            log.info("the lease on %s could not be given back: %s", folder.url, error)


@contextlib.contextmanager
def passing_run(runs: Store) -> Iterator[Store]:
    """A folder below `runs` for as long as the block runs."""
    with contextlib.suppress(Exception):  # somebody else's left-overs are no reason not to train
        collect_runs(runs, clock.wall())
    run = runs.sub(uuid.uuid4().hex)
    try:
        with leased_if_possible(run):
            yield run
    finally:
        with contextlib.suppress(Exception):  # a store that is gone is not what the caller has to hear of
            run.delete()


def collect_runs(runs: Store, now: float, age_s: float = ORPHAN_AGE_S) -> list[str]:
    """Remove folders of `passing_run` whose process was killed: nobody renews their lease, and all in them is old.

    Returns: their names.
    """
    removed = []
    for entry in runs.list():
        if not entry.is_dir or not _ID.match(entry.path):
            continue
        run = runs.sub(entry.path)
        files = [file for file in run.list(recursive=True) if not file.is_dir]
        newest = max((file.modified_s for file in files), default=entry.modified_s)
        if newest < now - age_s and all(_OURS.match(file.path) for file in files) and not is_leased(run, now):
            run.delete()
            removed.append(entry.path)
    return removed


RUNS = "runs"
_IDENTITY = "run.json"
_OLD_CONTENT = "content"
"""In the identities of earlier versions: the sorted checksums of the shards alone."""


class RunFolders(ClusterParams, StorageParams):
    """What an estimator does with `checkpoint_dir`, `run_id` and `resume`."""

    DECIDING: tuple[str, ...] = (
        *("model", "optimizer", "loss", "loss_weights", "batch_size", "per_worker_batch_size", "transformation_fn"),
        *("gradient_clip_norm", "gradient_clip_value", "gradient_compression", "sync_batch_norm"),
    )
    """Settings that decide the course of a training: checkpoints of one with others are not gone on from."""
    _shared_datasets: SharedDatasets | None = None
    """Within fitMultiple: the sets that have been written for the same DataFrame."""

    def _launcher(self) -> Any:
        return (self.getOrDefault("run_options") or {}).get("launcher")

    def _base_store(self) -> Store:
        return Store.create(self.getOrDefault("store"), self.getOrDefault("storage_options"))

    def _runs(self) -> Store:
        """Where the folders of runs are: in checkpoint_dir, or in the store."""
        lasting = self.getOrDefault("checkpoint_dir")
        if lasting is None:
            return self._base_store().sub(RUNS)
        return Store.create(lasting, self.getOrDefault("storage_options"))

    def _check_shared(self, context: Any) -> None:
        """Whether the driver will see what workers leave there. Raises: StoreError."""
        if self._launcher() is None:
            ensure_shared(self._runs(), context)

    @contextlib.contextmanager
    def _run_folder(self, dataset: Dataset) -> Iterator[tuple[Store, str | None]]:
        """The folder of this run, and the checkpoint to go on from. It is removed in the end if it is not to last.

        Raises: RunTakenError: another driver has it. CheckpointError: its checkpoints cannot be used. StoreError.
        """
        runs = self._runs()
        if self.getOrDefault("checkpoint_dir") is None:
            with passing_run(runs) as run:
                yield run, None
            return
        identity = self._identity(dataset)
        run_id = self.getOrDefault("run_id") or f"{clock.wall():.0f}-{uuid.uuid4().hex[:8]}"
        if self._shared_datasets is not None:  # one of several trainings, each of which goes on where it was
            run_id += f"-{digest([identity, self._described_settings()])}"
        run = runs.sub(run_id)
        with contextlib.ExitStack() as lease:
            try:
                lease.enter_context(held_run(run, Checkpoints(run.sub(CHECKPOINTS)).newest_token()))
                if not self.getOrDefault("resume") and (run.exists(_IDENTITY) or run.exists(CHECKPOINTS)):
                    _delete_all_but_owners(run)
                resume_from = self._latest_checkpoint(run)
                if resume_from is not None:
                    self._check_identity(run, identity, dataset)
                else:
                    run.write_bytes(_IDENTITY, json.dumps(identity, indent=1).encode())
            except OSError as error:
                raise StoreError(f"checkpoint_dir {runs.url} cannot be used: {error}", url=runs.url) from error
            yield run, resume_from

    def _identity(self, dataset: Dataset) -> dict[str, Any]:
        """What has to be the same for a checkpoint to be gone on from."""
        return {
            "rows": dataset.rows("train"),
            "tensors": [
                [field.name, list(field.columns), field.dtype, list(field.shape)] for field in dataset.layout.fields
            ],
            "seed": self.getOrDefault("seed"),
            "shuffle": self.getOrDefault("shuffle"),
            "shards": _content_of(dataset),
            **{name: self._described(name) for name in self.DECIDING if self.isSet(name)},
        }

    def _described_settings(self) -> dict[str, str]:
        """All that param maps may differ in, epochs for one; not where the cluster is."""
        made = {param.name for param in self._paramMap} - {"storage_options", "run_options"}
        return {name: self._described(name) for name in sorted(made)}

    def _described(self, name: str) -> str:
        return described(
            self.getOrDefault(name), values=name != "model"
        )  # a checkpoint brings the model's values along

    def _check_identity(self, run: Store, identity: Mapping[str, Any], dataset: Dataset) -> None:
        found = _read_identity(run) if run.exists(_IDENTITY) else {}
        if _OLD_CONTENT in found and "shards" not in found:
            self._check_old_content(found, dataset)
            found = {**found, "shards": identity["shards"]}
            del found[_OLD_CONTENT]
        different = [name for name in {**identity, **found} if found.get(name) != identity.get(name)]
        if different[:1] == ["shards"]:
            raise CheckpointError(
                f"run_id={self.getOrDefault('run_id')!r} has checkpoints of other rows: those that are trained on now "
                "differ in values, in text or arrays of variable length, or in their order, by which a checkpoint "
                "knows the rows of its epoch that were used. Train on the set that was written then (dataset_id, "
                "keep_dataset), choose another run_id, or set resume=False to replace the checkpoints"
            )
        if different:
            name = different[0]
            raise CheckpointError(
                f"run_id={self.getOrDefault('run_id')!r} has checkpoints of another training: {name} was "
                f"{_short(found.get(name))} and is {_short(identity.get(name))}. Choose another run_id, or set "
                "resume=False to replace them"
            )

    def _check_old_content(self, found: Mapping[str, Any], dataset: Dataset) -> None:
        """Raises: CheckpointError: the rows are others, or may be."""
        shards = dataset.manifest.shards
        checksums = sorted(shard.crc32 for shard in shards if shard.rows)
        one_a_split = all(len(each) == 1 for each in dataset.manifest.splits.values())
        if found[_OLD_CONTENT] != checksums or not one_a_split or any(shard.sidecar for shard in shards):
            raise CheckpointError(
                f"run_id={self.getOrDefault('run_id')!r} has checkpoints of an earlier version of spark_elastic, which "
                "did not note the order of the rows and their values of variable length: whether they are the rows of "
                "now cannot be told. Go on with the version that began it, choose another run_id, or set resume=False "
                "to replace the checkpoints"
            )

    def _latest_checkpoint(self, run: Store) -> str | None:
        """Raises: CheckpointError."""
        found = Checkpoints(run.sub(CHECKPOINTS)).latest()
        return None if found is None else found.name


def _delete_all_but_owners(run: Store) -> None:
    for entry in run.list():
        if entry.path != OWNERS:
            run.delete(entry.path)


def _read_identity(run: Store) -> dict[str, Any]:
    """Raises: CheckpointError: it is not what was written."""
    try:
        found = json.loads(run.read_bytes(_IDENTITY))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{run.url}/{_IDENTITY}, which says what the checkpoints beside it are of, is damaged: {error}. Choose "
            "another run_id, or set resume=False to delete them and start over"
        ) from error
    return found


def _content_of(dataset: Dataset) -> dict[str, str]:
    """A digest for each split: of all checksums, those of sidecars too, in the order of the rows."""
    made = {}
    for name, shards in dataset.manifest.splits.items():
        checksums = [[shard.rows, shard.crc32, shard.sidecar_crc32] for shard in shards]
        made[name] = hashlib.sha256(json.dumps(checksums).encode()).hexdigest()[:32]
    return made


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."

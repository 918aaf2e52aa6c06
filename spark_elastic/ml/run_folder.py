"""The folder of an estimator's training: where it is, whose it is, and what a fit goes on from there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from spark_elastic import clock
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.sharing import ensure_shared
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, StoreError
from spark_elastic.ml.checkpoints import Checkpoints
from spark_elastic.ml.describing import described, digest
from spark_elastic.ml.run_lease import OWNERS, held_run
from spark_elastic.ml.runs import passing_run
from spark_elastic.ml.several_fits import SharedSets
from spark_elastic.ml.shared_params import ClusterParams, StorageParams
from spark_elastic.ml.training.spec import CHECKPOINTS

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
    _sets: SharedSets | None = None
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
        if self._sets is not None:  # one of several trainings, each of which goes on where it was
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

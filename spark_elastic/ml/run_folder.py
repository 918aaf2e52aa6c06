"""The folder of an estimator's training: where it is, whose it is, and what a fit goes on from there."""

from __future__ import annotations

import contextlib
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
from spark_elastic.ml.runs import passing_run
from spark_elastic.ml.several_fits import SharedSets
from spark_elastic.ml.shared_params import ClusterParams, StorageParams
from spark_elastic.ml.training.spec import CHECKPOINTS

RUNS = "runs"
_IDENTITY = "run.json"


class RunFolders(ClusterParams, StorageParams):
    """What an estimator does with `checkpoint_dir`, `run_id` and `resume`."""

    DECIDING: tuple[str, ...] = (
        *("model", "optimizer", "loss", "loss_weights", "batch_size", "per_worker_batch_size", "transformation_fn"),
        *("gradient_clip_norm", "gradient_clip_value", "gradient_compression"),
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
        """The folder of this run, and the checkpoint to go on from. It is removed in the end if it is not to last."""
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
        try:
            if not self.getOrDefault("resume") and run.exists(_IDENTITY):
                run.delete()
            resume_from = self._latest_checkpoint(run)
            if resume_from is not None:
                self._check_identity(run, identity)
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
            "content": sorted(shard.crc32 for shard in dataset.manifest.shards if shard.rows),
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

    def _check_identity(self, run: Store, identity: Mapping[str, Any]) -> None:
        found = json.loads(run.read_bytes(_IDENTITY)) if run.exists(_IDENTITY) else {}
        different = [name for name in {**identity, **found} if found.get(name) != identity.get(name)]
        if different:
            name = different[0]
            raise CheckpointError(
                f"run_id={self.getOrDefault('run_id')!r} has checkpoints of another training: {name} was "
                f"{_short(found.get(name))} and is {_short(identity.get(name))}. Choose another run_id, or set "
                "resume=False to replace them"
            )

    def _latest_checkpoint(self, run: Store) -> str | None:
        """Raises: CheckpointError."""
        found = Checkpoints(run.sub(CHECKPOINTS)).latest()
        return None if found is None else found.name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."

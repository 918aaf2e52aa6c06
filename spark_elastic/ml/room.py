"""Whether a training's folder has room for what the training will write there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from spark_elastic.errors import StoreError
from spark_elastic.ml.training.spec import CHECKPOINTS

if TYPE_CHECKING:
    from spark_elastic.data.store import Store
    from spark_elastic.ml.training.spec import CheckpointPlan, Training


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

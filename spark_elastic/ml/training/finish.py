"""The end of a training: what it has come to is written, and all workers wait for that."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_elastic.collective.operations import barrier
from spark_elastic.errors import CheckpointError, StoreError
from spark_elastic.ml.training.progress import Phase
from spark_elastic.ml.training.spec import HISTORY_FILE

if TYPE_CHECKING:
    from spark_elastic.data.store import Store
    from spark_elastic.ml.training.trainer import Trainer

log = logging.getLogger("spark_elastic.ml")

WRITE_PAUSES_S = (0.5, 2.0)
"""Before what a whole training has come to is tried to be written again: a storage may be busy."""


def finish(trainer: Trainer) -> None:
    """Write the model. Who is rank 0 now does it, again if the last rank 0 is gone, and all wait for it."""
    state, engine = trainer.state, trainer.engine
    engine.finish()
    for callback in trainer.callbacks:
        callback.on_fit_end(trainer.run)
    if trainer.run.wants_restore and engine.keeps_best and state.at.best_epoch is not None:
        engine.use_best()
    if trainer.rank == 0:
        store = trainer.training.store
        _write(store, *engine.model_file())
        _write(store, HISTORY_FILE, state.at.history.dumps().encode())
        try:
            trainer.lasting.drain()
        except CheckpointError as error:  # the model is there; what is missing is only what it could go on from
            log.warning("%s", error)
    barrier()
    state.at = replace(state.at, phase=Phase.DONE, serial=state.at.serial + 1)


def _write(store: Store, file: str, data: bytes) -> None:
    """Raises: StoreError: the store would not have it, several times."""
    for pause in WRITE_PAUSES_S:
        try:
            store.write_bytes(file, data)
            return
        except Exception as error:  # each kind of storage has its own
            log.warning("%s could not be written to %s and is tried again: %s", file, store.url, error)
            time.sleep(pause)
    try:
        store.write_bytes(file, data)
    except Exception as error:
        raise StoreError(f"the training is done, but {file} cannot be written to {store.url}: {error}") from error

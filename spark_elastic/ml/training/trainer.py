"""One worker's part of a training, phase by phase.

Between two collectives nothing is done that could not be done again: when one fails, the plain values go back to the
last resume point (`ElasticState`), at which model and optimizer still stand, and the phase goes on from there in the
next world. So every change of `state.at` follows the collective that confirms it, and a resume point follows the
change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from spark_elastic.collective.process import process
from spark_elastic.data.reader import BatchReader
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.training.checkpoint_schedule import Lasting
from spark_elastic.ml.training.engine import Engine, TrainingState, host_cores, threads_for
from spark_elastic.ml.training.epoch_end import end_epoch
from spark_elastic.ml.training.finish import finish
from spark_elastic.ml.training.passes import train, validate
from spark_elastic.ml.training.progress import Phase
from spark_elastic.ml.training.reporting import reporter_of
from spark_elastic.ml.training.run_view import RunView
from spark_elastic.ml.training.saving import Saving, timeout_s
from spark_elastic.ml.training.spec import Training

PHASES: dict[Phase, Callable[[Trainer], None]] = {
    Phase.TRAIN: train,
    Phase.VALIDATE: validate,
    Phase.EPOCH_END: end_epoch,
    Phase.FINISH: finish,
}


class Trainer:
    """Does the phases of `state.at`, with what they share."""

    def __init__(
        self,
        training: Training,
        *,
        engine: Engine,
        state: TrainingState,
        callbacks: Sequence[Callback],
        lasting: Lasting,
    ) -> None:
        self.training = training
        self.engine = engine
        self.state = state
        self.callbacks = list(callbacks)
        self.lasting = lasting
        self.run = RunView(self)
        self.on_batch_begin = overridden(self.callbacks, "on_batch_begin")
        self.on_batch_end = overridden(self.callbacks, "on_batch_end")
        self.rank, self.size = 0, 1
        self.lost_here = False
        """Whether the rows of this worker had the loss that ended the training."""
        self._readers: dict[str, BatchReader] = {}
        self.reporter = reporter_of(self)
        self._begun = False
        self.save_s = timeout_s(os.environ)
        self.saving: Saving | None = None
        """Of what the training has come to; None: this worker was not rank 0 then."""
        self.reader("train").bring()  # here, and not in the first step, for which all the others would wait

    def go_on(self) -> None:
        """From wherever the state stands to the end; in each new world again.

        Raises: HorovodInternalError, HostsUpdatedInterrupt: for the elastic loop.
        """
        position = process.require()
        self.rank, self.size = position.rank, position.size
        at = self.state.at
        if at.phase is Phase.DONE:
            return  # a worker was lost after the end: the others have taken up what they had come to
        self.engine.use_threads(threads_for(self.training.num_threads, host_cores(), position.local_size))
        self.engine.enter(self.rank, self.size)
        self.run.forget()
        for reader in self._readers.values():
            reader.set_world(self.rank, self.size)
        if not self._begun:
            self._begun = True
            self.lasting.begin()
            if self.reporter is not None:
                self.reporter.begin()
            for callback in self.callbacks:
                callback.on_fit_begin(self.run)
        while self.state.at.phase is not Phase.DONE:
            PHASES[self.state.at.phase](self)

    @property
    def batch_size(self) -> int:
        """Rows of a global batch in this world."""
        return self.training.batch_size or (self.training.per_worker_batch_size or 1) * self.size

    @property
    def restored(self) -> int | None:
        return self.state.at.best_epoch if self.run.wants_restore else None

    @property
    def unsaved(self) -> dict[str, bytes]:
        """Files that the store would not have."""
        return self.saving.left if self.saving is not None and self.rank == 0 else {}

    def rows_checked(self, timeout_s: float) -> bool:
        """Whether the rows that this worker has read are known to be those that were written, see `BatchReader`."""
        return all(reader.checked(timeout_s) for reader in self._readers.values())

    def close(self) -> None:
        if self.saving is not None:
            self.saving.close()
        if self.reporter is not None:
            self.reporter.close()
        for reader in self._readers.values():
            reader.close()
        self.lasting.close()
        self.engine.close()

    def reader(self, split: str) -> BatchReader:
        if split not in self._readers:
            training = self.training
            self._readers[split] = BatchReader(
                training.dataset,
                split,
                batch_size=self.batch_size,
                rank=self.rank,
                size=self.size,
                seed=training.seed,
                shuffle=training.shuffle and split == "train",
                order=training.order if split == "train" else "auto",
                prefetch=training.prefetch,
                cache_dir=training.cache_dir,
                cache_bytes=training.cache_bytes,
            )
        return self._readers[split]


def overridden(callbacks: Sequence[Callback], event: str) -> list[Callable[..., None]]:
    """The callbacks that do something at this event; most do nothing at every batch."""
    plain = getattr(Callback, event)
    return [call for call in (getattr(one, event) for one in callbacks) if getattr(call, "__func__", call) is not plain]

"""What the workers of a fit returned, and the files that they wrote to its run folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from spark_elastic.data.store import Store
from spark_elastic.errors import LossNotFiniteError, RunTakenError, StoreError
from spark_elastic.ml.training.spec import STOPPED_ELSEWHERE, TrainingResult
from spark_elastic.redaction import redacted
from spark_elastic.runs.lease import RunLease

log = logging.getLogger("spark_elastic.ml")


class FitResults:
    """The results of a training in all workers, None for a worker without one; see `TrainingResult`."""

    def __init__(self, store: Store, results: Sequence[TrainingResult | None]) -> None:
        present = [result for result in results if result is not None]
        self._store = store
        self._results = results
        self._diverged = present[0].diverged
        self.history = present[0].history
        # the rank that requested a stop knows why, and the others only that there was one
        self.stopped = min((result.stopped for result in present), key=STOPPED_ELSEWHERE.__eq__)
        self.unsaved: Mapping[str, bytes] = next((result.unsaved for result in present if result.unsaved), {})

    def check(self, has_checkpoints: bool, lease: RunLease | None) -> None:
        """Raise `LossNotFiniteError` if the training diverged, `RunTakenError` if another driver has taken the run."""
        if (diverged := self._diverged) is not None:
            causes = [result is not None and result.caused_divergence for result in self._results]
            raise LossNotFiniteError(
                loss=diverged.loss,
                step=diverged.step + 1,
                epoch=diverged.epoch,
                ranks=tuple(rank for rank, caused in enumerate(causes) if caused),
                size=len(causes),
                checkpoints=self._store.url if has_checkpoints else "",
            )
        try:
            if lease is not None:
                lease.check()
        except RunTakenError:
            raise
        except Exception as error:  # each kind of storage has its own
            if not self.unsaved:
                raise
            # The model came with the results and not out of the folder, so the folder's owner does not matter.
            log.warning("the lease on the run %s could not be checked: %s", self._store.url, redacted(error))

    def read(self, name: str) -> bytes:
        """Return a file that the workers wrote. Raises `StoreError` if the driver cannot see it in the run folder."""
        if name in self.unsaved:
            log.warning(
                "%s could not be written to %s and came with the results of the job: the model that fit returns is "
                "the only copy, save it with model.save(path)",
                name,
                self._store.url,
            )
            return self.unsaved[name]
        try:
            return self._store.read_bytes(name)
        except OSError as error:
            raise StoreError(
                f"the workers wrote the trained model to {self._store.url}, but the driver cannot read it there "
                f"({error}); set store, or checkpoint_dir, to a place that driver and executors share",
                url=self._store.url,
            ) from error

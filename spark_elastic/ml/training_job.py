"""Train in the workers of a job, and again from the newest checkpoint when all workers that had the state are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spark_elastic.data.store import Store
from spark_elastic.errors import LossNotFiniteError, RunTakenError, StateLostError, StoreError
from spark_elastic.jobs.driver_callbacks import CallbackSession
from spark_elastic.ml.training.spec import STOPPED_ELSEWHERE
from spark_elastic.redaction import redacted
from spark_elastic.reporting.history import History
from spark_elastic.runs.checkpoints import CHECKPOINTS, Checkpoints
from spark_elastic.runs.lease import lease_of

log = logging.getLogger("spark_elastic.ml")


@dataclass(frozen=True)
class TrainedRun:
    """The results of a training's job, and the files that its workers wrote; `unsaved` came with the results.

    `stopped` says why the training ended before the last epoch; "" if it did not.
    """

    run: Store
    history: History
    events: tuple[Mapping[str, Any], ...]
    unsaved: Mapping[str, bytes]
    stopped: str = ""

    def read(self, name: str) -> bytes:
        """Return a file from the run's folder, or from the results. Raises `StoreError` if the driver cannot see it."""
        if name in self.unsaved:
            log.warning(
                "%s could not be written to %s and came with the results of the job: the model that fit returns is "
                "the only copy, save it with model.save(path)",
                name,
                self.run.url,
            )
            return self.unsaved[name]
        try:
            return self.run.read_bytes(name)
        except OSError as error:
            raise StoreError(
                f"the workers wrote the trained model to {self.run.url}, but the driver cannot read it there "
                f"({error}); set store, or checkpoint_dir, to a place that driver and executors share",
                url=self.run.url,
            ) from error


def train(
    training: Any,
    run_job: Callable[[Any], list[Any]],
    events: list[Any],
    session: CallbackSession,
    has_checkpoints: bool,
) -> TrainedRun:
    """Train until the workers return results: `run_job` returns those of a job, and appends to the `events` of all.

    Raises:
        StateLostError: There is no newer checkpoint than the one that the training resumed from.
        LossNotFiniteError: The training diverged.
        RunTakenError: Another driver has taken over the run, and what its folder holds may be that driver's.
    """
    run = training.store
    while True:
        try:
            results = run_job(training)
            break
        except StateLostError as error:
            if error is session.raised:
                raise  # of another fit, which a callback has made
            if not has_checkpoints:
                error.message += "; with checkpoint_dir, fit resumes from the last checkpoint by itself"
                raise
            newest = Checkpoints(run.sub(CHECKPOINTS)).latest()
            if newest is None or newest.name == training.resume_from:
                raise
            log.warning(
                "every worker that held the state is lost; training resumes from the checkpoint %s", newest.name
            )
            training = replace(training, resume_from=newest.name)
    present = [result for result in results if result is not None]
    if (diverged := present[0].diverged) is not None:
        raise LossNotFiniteError(
            loss=diverged.loss,
            step=diverged.step + 1,
            epoch=diverged.epoch,
            ranks=tuple(rank for rank, each in enumerate(results) if each is not None and each.caused_divergence),
            size=len(results),
            checkpoints=run.url if has_checkpoints else "",
        )
    unsaved: Mapping[str, bytes] = next((result.unsaved for result in present if result.unsaved), {})
    try:
        if (lease := lease_of(run)) is not None:
            lease.check()
    except RunTakenError:
        raise
    except Exception as error:  # each kind of storage has its own
        if not unsaved:
            raise
        # The model came with the results and not out of the folder, so the folder's owner does not matter.
        log.warning("the lease on the run %s could not be checked: %s", run.url, redacted(error))
    # The rank that asked for a stop knows why, and the others only that there was one.
    reasons = sorted((result.stopped for result in present), key=STOPPED_ELSEWHERE.__eq__)
    return TrainedRun(run, present[0].history, tuple(events), unsaved, reasons[0])

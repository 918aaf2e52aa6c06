"""The run folder of a job with `checkpoint_dir`: its lease, and where its loops resume from.

::

    <checkpoint_dir>/<run_id>/owners/              the lease, see `runs.lease`
                              checkpoints/         of the first elastic loop of the function
                              checkpoints-2/       of the second one
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spark_elastic.data.shared_store import ensure_shared
from spark_elastic.data.store import Store
from spark_elastic.elastic.loop import call_with_checkpoints
from spark_elastic.elastic.run_checkpoints import RunCheckpoints, folder_of
from spark_elastic.errors import CheckpointError
from spark_elastic.jobs.settings import RunCall
from spark_elastic.redaction import redacted
from spark_elastic.runs.checkpoints import CHECKPOINTS, CheckpointFacts, Checkpoints
from spark_elastic.runs.folder import IDENTITY_FILE, new_run_id, storage_errors
from spark_elastic.runs.lease import RunLease, opened_run
from spark_elastic.spark.cluster import Cluster

_FOLDER = re.compile(rf"{CHECKPOINTS}(?:-(\d+))?")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run that this process holds; `resume` has the checkpoint that each loop resumes from."""

    run: Store
    run_id: str
    lease: RunLease
    resume: dict[int, CheckpointFacts]

    def writing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function for the workers, whose loops write checkpoints and resume from them."""
        checkpoints = RunCheckpoints(self.lease.fence, self.resume)
        writing = functools.partial(call_with_checkpoints, function, checkpoints)
        return functools.update_wrapper(writing, function, updated=())

    def in_words(self) -> str:
        """Return a line about where the job begins."""
        if not self.resume:
            how = f"give the same checkpoint_dir and run_id={self.run_id!r}"
            return f"commits are written to {self.run.url}; to resume, {how}"
        return f"resuming run_id={self.run_id!r} in {self.run.url} from {_steps(self.resume)}"

    def resumable(self) -> str:
        """Return what can be resumed now, to append to the message of an error."""
        try:
            found = _newest(self.run, lambda each: next(reversed(each.complete()), None))
        except Exception as error:  # each kind of storage has its own
            return f"; the checkpoints in {self.run.url} cannot be listed now ({redacted(error)})"
        if not found:
            return f"; nothing was committed in {self.run.url} yet"
        return (
            f"; run_id={self.run_id!r} in {self.run.url} has {_steps(found)}: call run again with the same "
            "checkpoint_dir and run_id to resume from there"
        )


def open_run(call: RunCall, cluster: Cluster | None, undo: contextlib.ExitStack) -> RunFolder:
    """Hold the run folder of a call with `checkpoint_dir` until `undo` is closed.

    Raises RunTakenError if another driver holds the run, CheckpointError if all checkpoints of a loop are damaged or
    the folder is that of an estimator, and StoreError if it cannot be used or the executors do not share it.
    """
    runs = Store.create(call.checkpoint_dir)
    if cluster is not None:
        ensure_shared(runs, cluster)
    run_id = call.run_id or new_run_id()
    run = runs.sub(run_id)
    with storage_errors(runs):
        lease = undo.enter_context(opened_run(run, Checkpoints(folder_of(run, 1)).newest_token()))
        if run.exists(IDENTITY_FILE):
            raise CheckpointError(f"{run.url} is the folder of an estimator; choose another run_id")
        return RunFolder(run, run_id, lease, _newest(run, Checkpoints.latest))


def _newest(run: Store, choose: Callable[[Checkpoints], CheckpointFacts | None]) -> dict[int, CheckpointFacts]:
    """Return the checkpoint that is chosen of those of each loop, by the loop's number."""
    loops = [int(found[1] or 1) for entry in run.list() if (found := _FOLDER.fullmatch(entry.path.strip("/")))]
    chosen = {loop: choose(Checkpoints(folder_of(run, loop))) for loop in sorted(loops)}
    return {loop: facts for loop, facts in chosen.items() if facts is not None}


def _steps(points: dict[int, CheckpointFacts]) -> str:
    loop = max(points)
    return f"step {points[loop].step}" + (f" of loop {loop}" if loop > 1 else "")

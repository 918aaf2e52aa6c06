"""ElasticJob: the handle of a running job."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from spark_elastic import clock
from spark_elastic.driver.elastic_driver import ElasticDriver
from spark_elastic.errors import ResultError
from spark_elastic.membership.timeline import Record
from spark_elastic.reporting.event_log import MembershipChange, event_rows
from spark_elastic.reporting.history import draw_job
from spark_elastic.reporting.job_status import JobStatus
from spark_elastic.runs.lease import RunLease

_running: weakref.WeakSet[ElasticJob] = weakref.WeakSet()
EXIT_TIMEOUT_S = 5.0


class ElasticJob:
    """A job that runs on its own thread. Made by `spark_elastic.run_async`.

    It is cancelled if the interpreter exits while it runs.
    """

    def __init__(
        self,
        name: str,
        driver: ElasticDriver,
        prepare: Callable[[], None],
        clean_up: Callable[[], None],
        status_url: str | None = None,
        lease: RunLease | None = None,
    ):
        """Start a thread: `prepare` (waits for slots), driver, `clean_up`. A lost `lease` cancels the job."""
        self.name = name
        self._driver = driver
        self._prepare = prepare
        self._clean_up = clean_up
        self._status_url = status_url
        self._lease = lease
        self._results: list[Any] | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._began = clock.wall()
        self._thread = threading.Thread(target=self._run, name=f"spark_elastic-job-{name}", daemon=True)
        _running.add(self)
        self._thread.start()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for the end of the job.

        Args:
            timeout: The longest wait in seconds. None: no limit.

        Returns:
            What the function returned in each worker, by rank.

        Raises:
            TimeoutError: The job still runs after `timeout`. It is not cancelled.
            SparkElasticError: The job failed. A `UserFunctionError` carries the traceback of the function.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self.name} still runs after {timeout} s: {self.status().phase}")
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    def cancel(self, why: str = "cancelled by the caller", timeout: float = 5.0) -> None:
        """End the job, and wait up to `timeout` seconds until its tasks, processes, sockets and threads are gone.

        `result` raises JobCancelledError afterwards. No effect on a job that is over.
        """
        self._driver.cancel(why)
        self._over.wait(timeout)

    def done(self) -> bool:
        """Return True if the job has finished, failed or was cancelled."""
        return self._over.is_set()

    def status(self) -> JobStatus:
        """Return the state of the job at this moment."""
        return self._driver.status()

    def timeline(self) -> list[Record]:
        """Return the membership timeline so far: typed records, with times in seconds since the epoch."""
        return self._driver.announcer.timeline

    def changes(self) -> list[MembershipChange]:
        """Return the changes of the workers so far, in words and numbers, with times in seconds since the epoch."""
        return self._driver.announcer.changes

    @property
    def status_url(self) -> str | None:
        """The URL of the status page, with its token; None: there is no page, or the job is over."""
        return None if self.done() else self._status_url

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the number of workers over time, with the faults.

        Args:
            path: A file to write the figure to as well. Its suffix (.png, .svg, .pdf) selects the format.

        Returns:
            A matplotlib Figure.

        Raises:
            MissingExtraError: matplotlib is not installed (extra `plot`).
        """
        return draw_job(event_rows(self.changes(), self._began), self.name, path)

    def _run(self) -> None:
        try:
            with contextlib.nullcontext() if self._lease is None else self._lease.on_taken(self._driver.cancel):
                try:
                    self._prepare()
                except BaseException as error:
                    raise self._driver.never_ran(error) from None
                pickled = self._driver.run()
            self._results = [_load(result, rank) for rank, result in enumerate(pickled)]
        except BaseException as error:
            self._error = error
        finally:
            try:
                self._clean_up()
            finally:
                _running.discard(self)
                self._over.set()

    def __repr__(self) -> str:
        status = self.status()
        return f"<ElasticJob {self.name}: {status.phase}, {status.size} workers in round {status.round}>"


def _load(result: bytes, rank: int) -> Any:
    try:
        return cloudpickle.loads(result)
    except Exception as error:
        raise ResultError(
            f"the result of rank {rank} cannot be loaded in the driver: {type(error).__name__}: {error}; return plain "
            "values, or install the packages of its classes in the driver too"
        ) from error


@atexit.register
def _cancel_all() -> None:
    """Cancel all jobs at the interpreter's exit, because a job cannot run without its driver."""
    for job in list(_running):
        job._driver.cancel("the driver program is exiting")
    for job in list(_running):
        job._over.wait(EXIT_TIMEOUT_S)

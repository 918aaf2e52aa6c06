"""MLflowCallback: report a fit to MLflow, from the driver, without ever stopping or delaying the training."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from spark_elastic import clock
from spark_elastic.errors import InvalidSettingsError, MissingExtraError
from spark_elastic.jobs.driver_callbacks import DriverCallback, DriverResult, DriverRun
from spark_elastic.jobs.tracking import search_run_id
from spark_elastic.redaction import redacted
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.history import Row
from spark_elastic.trackers import mlflow_models
from spark_elastic.trackers.mlflow_server import answers, is_reachable, large_requests, quick_requests

log = logging.getLogger("spark_elastic.mlflow")

NOT_METRICS = ("epoch", "ended")
RETRY_AFTER_S = 10.0
"""Time after a failure before the tracking server is tried again."""
MOST_TRIES = 3
"""Times that something is sent to a server that answers but fails to take it, for example under load."""
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")
_LONGEST_NAME, _MOST_METRICS = 250, 1000
"""MLflow's limits of a metric's name, and of the metrics in one request."""
_PARENT = "mlflow.parentRunId"
MODELS = ("native", "spark")


class MLflowCallback(DriverCallback):
    """Logs settings, epochs, changes of the workers, the plot and the model of a fit to MLflow.

    If a run is active on the thread that calls `fit`, that run is logged to and left active; otherwise the callback
    starts one and ends it. The tracking server is the one of `mlflow.set_tracking_uri`. If it cannot be reached, there
    is one warning, the training continues, and what was not logged is sent once the server is back, at the latest at
    the end of the fit.

    Args:
        run_name: Name of a run that is started.
        experiment_name: Experiment of a run that is started. Default: the active one.
        nested: Start a run below the active one, instead of logging to that: for several fits in one run, and for
            those of a `CrossValidator`, which are below the run that is active where its `fit` is called.
        tags: Tags of the run.
        log_models: "native": the trained module or Keras model as `native_model`, with a signature, which loads without
            Spark; "spark": the Spark model as `spark_model`. [] for none.
        registered_model_name: Name under which the native model is registered (the Spark model, if only that is
            logged).

    Raises:
        MissingExtraError: MLflow is not installed (extra `mlflow`).
        InvalidSettingsError: An argument is invalid.
    """

    decides_within_s = 0.0

    def __init__(
        self,
        *,
        run_name: str | None = None,
        experiment_name: str | None = None,
        nested: bool = False,
        tags: Mapping[str, str] | None = None,
        log_models: Sequence[str] = MODELS,
        registered_model_name: str | None = None,
    ) -> None:
        check_installed()
        kinds = [log_models] if isinstance(log_models, str) else list(log_models)
        if unknown := [each for each in kinds if each not in MODELS]:
            raise InvalidSettingsError(f'log_models must be a list of "native" and "spark", not {unknown[0]!r}')
        self.run_name = run_name
        self.experiment_name = experiment_name
        self.nested = nested
        self.tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self.log_models = tuple(kinds)
        self.registered_model_name = registered_model_name
        self.log_settings = True
        self._fits = threading.local()
        """The fits of each thread: all events of a fit come on one."""

    @property
    def run_id(self) -> str | None:
        """The id of the run that this thread's newest fit was logged to; None before, and if none could be started."""
        fit: MLflowFit | None = getattr(self._fits, "newest", None)
        return None if fit is None else fit.run_id

    def on_fit_start(self, run: DriverRun) -> None:
        self._fits.newest = fit = MLflowFit(self, run)
        fit.begin()
        self._present().append(fit)

    def on_epoch_end(self, row: Row) -> None:
        self._present()[-1].epoch(row)

    def on_membership_change(self, change: MembershipChange) -> None:
        self._present()[-1].change(change)

    def on_fit_end(self, result: DriverResult) -> None:
        self._present().pop().end(result)

    def _present(self) -> list[MLflowFit]:
        """Return the fits that run on this thread. The last has begun within an event of the one before it."""
        if not hasattr(self._fits, "present"):
            self._fits.present = []
        fits: list[MLflowFit] = self._fits.present
        return fits


@dataclass(slots=True)
class _ToLog:
    """Something that is to be logged: its name for people, the call that does it, and how often that has failed."""

    name: str
    call: Callable[[], None]
    failures: int = 0


class MLflowFit:
    """One fit's way into MLflow: a queue of what is to be logged, and the run that it goes to.

    What cannot be sent because the server cannot be reached stays in the queue, with its times.
    """

    def __init__(self, callback: MLflowCallback, run: DriverRun) -> None:
        self._callback = callback
        self._run = run
        self._owns_run = False
        self._client: Any = None
        self.run_id: str | None = None
        self._queue: list[_ToLog] = []
        self._is_ending = False
        self._retry_at = 0.0
        self._is_away = True
        """The server has not answered the last request, or there was none yet."""
        self._is_without_run = False
        """The server has refused the run itself, so there is nothing to log to."""
        self._warned: set[str] = set()
        """What a warning was written about; "" for the server as a whole."""
        self._workers: int | None = None
        self._epochs = 0
        """The epoch that follows those that were reported: the step of what happens meanwhile."""

    def begin(self) -> None:
        self._log("the run", self._start_run)
        if self._callback.log_settings:
            self._log("the settings", self._log_settings)
        tags = {"spark_elastic.resumed": str(self._run.resumed).lower(), **self._callback.tags}
        self._log("the tags", lambda: self._set_tags(tags))

    def epoch(self, row: Row) -> None:
        self._epochs = int(row["epoch"]) + 1
        values = {name: float(value) for name, value in row.items() if name not in NOT_METRICS and value is not None}
        if self._workers is not None:
            values["workers"] = self._workers  # at each epoch, or a chart would draw a slope between two changes
        self._log("an epoch", lambda: self._log_metrics(values, int(row["epoch"]), float(row["ended"])))

    def change(self, change: MembershipChange) -> None:
        step, self._workers = self._epochs, change.after
        self._log("the workers", lambda: self._log_metrics({"workers": change.after}, step, change.at))
        if change.kind not in ("finished", "failed"):
            self._log("a change", lambda: self._set_tags({"spark_elastic.last_change": str(change)}))

    def end(self, result: DriverResult) -> None:
        self._retry_at, self._is_ending = 0.0, True
        self._log("the outcome", lambda: self._set_tags(_outcome(result)))
        self._log("the events", lambda: self._log_events(result))
        if result.model is not None:
            self._log("the plot", lambda: self._log_plot(result.model))
            self._log("the model", lambda: self._log_models(result.model))
        self._log("the end of the run", lambda: self._end_run(result.error))
        if self._queue:
            log.warning(
                "the MLflow run of this fit is incomplete: %s could not be logged, because the tracking server cannot "
                "be reached",
                ", ".join(dict.fromkeys(each.name for each in self._queue)),
            )
            self._leave_run()

    # --- the queue --------------------------------------------------------------------------------

    def _log(self, name: str, call: Callable[[], None]) -> None:
        """Queue a call, and do what is queued as far as the server can be reached."""
        if self._is_without_run:
            return
        self._queue.append(_ToLog(name, call))
        if clock.monotonic() < self._retry_at:
            return
        with quick_requests():
            while self._queue:
                item = self._queue[0]
                uri = _mlflow().get_tracking_uri()
                if not is_reachable(uri):
                    self._wait_for_server(uri, "it accepts no connection")
                    return
                if self._is_away and not answers(uri):
                    self._wait_for_server(uri, "it does not answer")
                    return
                self._is_away = False
                try:
                    item.call()
                except Exception as error:
                    item.failures += 1
                    again = _may_pass(error) and item.failures < MOST_TRIES and not self._is_ending
                    if again or not answers(uri):  # or it went away meanwhile
                        self._wait_for_server(uri, f"{type(error).__name__}: {error}")
                        return
                    if item.name not in self._warned:
                        self._warned.add(item.name)
                        why = redacted(error)
                        log.warning("%s could not be logged to MLflow: %s: %s", item.name, type(error).__name__, why)
                    if self.run_id is None:
                        self._is_without_run = True
                        self._queue.clear()
                        return
                self._queue.pop(0)

    def _wait_for_server(self, uri: str, why: str) -> None:
        self._retry_at, self._is_away = clock.monotonic() + RETRY_AFTER_S, True
        if "" not in self._warned:
            self._warned.add("")
            log.warning(
                "the MLflow tracking server %s cannot be reached (%s); the training continues, and what is not logged "
                "now is logged when the server is back, at the latest at the end of the fit",
                redacted(uri),
                redacted(why),
            )

    # --- calls of MLflow --------------------------------------------------------------------------

    def _start_run(self) -> None:
        mlflow, callback = _mlflow(), self._callback
        active = mlflow.active_run()
        search = search_run_id()
        in_search = active is not None and active.info.run_id == search  # whose other fits have runs of their own
        if active is None or callback.nested or in_search:
            experiment = None
            if callback.experiment_name is not None:
                experiment = _experiment_id(callback.experiment_name)
            below = search if callback.nested and active is None else None
            active = mlflow.start_run(
                run_name=callback.run_name,
                experiment_id=experiment,
                nested=active is not None,
                tags=None if below is None else {_PARENT: below},
            )
            self._owns_run = True
        self._client = mlflow.MlflowClient()
        self.run_id = active.info.run_id

    def _log_settings(self) -> None:
        from mlflow.entities import Param

        client = self._client
        there = client.get_run(self.run_id).data.params  # of autologging, or of an earlier fit: they cannot be changed
        params = {"estimator": self._run.name, **self._run.settings}
        new = [Param(name, str(value)) for name, value in params.items() if name not in there]
        for start in range(0, len(new), 100):
            client.log_batch(self.run_id, params=new[start : start + 100])

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self.run_id, tags=[RunTag(name, redacted(value)[:5000]) for name, value in tags.items()])

    def _log_metrics(self, values: Mapping[str, float], step: int, at: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(_metric_name(name), value, int(1000 * at), step) for name, value in values.items()]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + _MOST_METRICS])

    def _log_events(self, result: DriverResult) -> None:
        client = self._client
        client.log_dict(self.run_id, {"events": [dict(event) for event in result.events]}, "spark_elastic/events.json")
        text = "\n".join(f"{event['seconds']:9.1f} s  {event['text']}" for event in result.events)
        client.log_text(self.run_id, f"{text}\n", "spark_elastic/events.txt")

    def _log_plot(self, model: Any) -> None:
        try:
            figure = model.plot()
        except MissingExtraError:
            return  # without the extra `plot` there is no picture
        self._client.log_figure(self.run_id, figure, "spark_elastic/plot.png")

    def _log_models(self, model: Any) -> None:
        name = self._callback.registered_model_name
        with self._in_run(), large_requests():
            if "native" in self._callback.log_models:
                mlflow_models.log_native(model, name)
                name = None
            if "spark" in self._callback.log_models:
                mlflow_models.log_spark(model, name)

    @contextlib.contextmanager
    def _in_run(self) -> Iterator[None]:
        """Have the fit's run active in the block: models are logged to the active one."""
        mlflow = _mlflow()
        if self._is_active():
            yield
            return
        status = self._client.get_run(self.run_id).info.status  # its owner's, who has ended it during the fit
        try:
            with mlflow.start_run(run_id=self.run_id, nested=mlflow.active_run() is not None):
                yield
        finally:
            self._client.update_run(self.run_id, status=status)

    def _is_active(self) -> bool:
        active = _mlflow().active_run()
        return active is not None and active.info.run_id == self.run_id

    def _end_run(self, error: BaseException | None) -> None:
        if not self._owns_run:
            return
        status = "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        if self._is_active():
            _mlflow().end_run(status)
        elif error is not None or self._client.get_run(self.run_id).info.status == "RUNNING":
            self._client.set_terminated(self.run_id, status)  # another is active now, which is not ours to end

    def _leave_run(self) -> None:
        """Take a run that could not be ended off this thread's stack, or the next fit would be logged to it."""
        if self._owns_run and self._is_active():
            with contextlib.suppress(Exception), quick_requests():
                _mlflow().end_run("FAILED")


def autologging_callbacks(given: Sequence[DriverCallback]) -> list[DriverCallback]:
    """Return a callback that logs epochs and workers to the run of autologging; none if a `MLflowCallback` is given."""
    if any(isinstance(each, MLflowCallback) for each in given) or _mlflow().active_run() is None:
        return []
    callback = MLflowCallback(log_models=[])
    callback.log_settings = False
    return [callback]


def _outcome(result: DriverResult) -> dict[str, str]:
    """Return the tags of a fit that has ended."""
    kinds = [event["kind"] for event in result.events]
    tags = {f"spark_elastic.{kind}": str(kinds.count(kind)) for kind in ("lost", "joined", "drained")}
    if result.stopped:
        tags["spark_elastic.stopped"] = result.stopped
    if result.error is not None:
        tags["spark_elastic.error"] = f"{type(result.error).__name__}: {result.error}"
    return tags


def _may_pass(error: Exception) -> bool:
    """Return True for a failure of the server, which need not come again: an overload, a timeout, its database."""
    status = getattr(error, "get_http_status_code", None)
    return callable(status) and (status() == 429 or status() >= 500)


def _metric_name(name: str) -> str:
    """Return a name that MLflow takes: one bad name would lose all values of its epoch."""
    clean = _NOT_IN_NAMES.sub("_", name)
    if posixpath.normpath(clean) != clean or clean.startswith(("/", "..")) or clean == ".":
        clean = clean.replace("/", "_").replace("..", "__")
    return clean[:_LONGEST_NAME]


def _experiment_id(name: str) -> str:
    client = _mlflow().MlflowClient()
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


def _mlflow() -> Any:
    return import_module("mlflow")


def check_installed() -> None:
    """Raise `MissingExtraError` if MLflow is not installed."""
    try:
        _mlflow()
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "mlflow":
            raise
        raise MissingExtraError(what="MLflowCallback", package="mlflow", extra="mlflow") from None

"""MLflowCallback: report a fit to MLflow, from the driver, without ever stopping or delaying the training."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from spark_elastic.errors import InvalidSettingsError, MissingExtraError
from spark_elastic.jobs.driver_callbacks import DriverCallback, DriverResult, DriverRun
from spark_elastic.jobs.tracking import search_run_id
from spark_elastic.redaction import redacted
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.history import Row
from spark_elastic.trackers import mlflow_models
from spark_elastic.trackers.fits import FitsCallback

log = logging.getLogger("spark_elastic.mlflow")

END_WAIT_S = 60.0  # seconds for which the end of a fit waits for what the tracking server has not taken yet
_NOT_METRICS = ("epoch", "ended")
_NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")
_LONGEST_NAME = 250
_PARENT = "mlflow.parentRunId"
_MODELS = ("native", "spark")
#: Limits of the requests for which a fit waits at its start. MLflow's own are minutes for each.
_BRIEF = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "40",
}


class MLflowCallback(FitsCallback):
    """Logs settings, epochs, changes of the workers, the plot and the model of a fit to MLflow.

    If a run is active on the thread that calls `fit`, that run is logged to and left active; otherwise the callback
    starts one and ends it. The tracking server is the one of `mlflow.set_tracking_uri`. Settings, epochs and changes
    are sent from another thread, where MLflow retries for minutes; what it then gives up is named by a warning. If no
    run can be started, there is a warning, and nothing is logged. The training continues in any case.

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

    def __init__(
        self,
        *,
        run_name: str | None = None,
        experiment_name: str | None = None,
        nested: bool = False,
        tags: Mapping[str, str] | None = None,
        log_models: Sequence[str] = _MODELS,
        registered_model_name: str | None = None,
    ) -> None:
        super().__init__("mlflow")
        kinds = [log_models] if isinstance(log_models, str) else list(log_models)
        if unknown := [each for each in kinds if each not in _MODELS]:
            raise InvalidSettingsError(f'log_models must be a list of "native" and "spark", not {unknown[0]!r}')
        self.run_name = run_name
        self.experiment_name = experiment_name
        self.nested = nested
        self.tags = {str(name): str(value) for name, value in (tags or {}).items()}
        self.log_models = tuple(kinds)
        self.registered_model_name = registered_model_name
        self.log_settings = True

    @property
    def run_id(self) -> str | None:
        """The id of the run that this thread's newest fit was logged to; None before, and if none could be started."""
        fit: _MLflowFit | None = getattr(self._thread, "newest", None)
        return None if fit is None else fit.run_id

    def on_fit_start(self, run: DriverRun) -> None:
        self._thread.newest = fit = _MLflowFit(self, run)
        fit.begin()
        self._fits().append(fit)


class _MLflowFit:
    """One fit's way into MLflow: the run, and a thread that sends what the fit does not wait for, in its order."""

    def __init__(self, callback: MLflowCallback, run: DriverRun) -> None:
        self._callback = callback
        self._run = run
        self._owns_run = False
        self._client: Any = None
        self.run_id: str | None = None
        # a daemon: a request that the server never answers must not hold the program's exit
        self._sender = threading.Thread(target=self._send_all, name="spark_elastic mlflow", daemon=True)
        self._calls: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        """What the thread has to send, each with its name; None: nothing follows."""
        self._late = False  # the fit does not wait for the thread any longer
        self._warned: set[str] = set()
        self._workers: int | None = None
        self._epochs = 0  # the epoch that follows those that were reported: the step of what happens meanwhile

    def begin(self) -> None:
        with _brief_requests():
            self._try("the run", self._start_run)
        if self.run_id is None:
            return
        self._sender.start()
        if self._callback.log_settings:
            self._send("the settings", self._log_settings)
        tags = {"spark_elastic.resumed": str(self._run.resumed).lower(), **self._callback.tags}
        self._send("the tags", lambda: self._set_tags(tags))

    def epoch(self, row: Row) -> None:
        self._epochs = int(row["epoch"]) + 1
        values = {name: float(value) for name, value in row.items() if name not in _NOT_METRICS and value is not None}
        if self._workers is not None:
            values["workers"] = self._workers  # at each epoch, or a chart would draw a slope between two changes
        self._send("an epoch", lambda: self._log_metrics(values, int(row["epoch"]), float(row["ended"])))

    def change(self, change: MembershipChange) -> None:
        step, self._workers = self._epochs, change.after
        self._send("the workers", lambda: self._log_metrics({"workers": change.after}, step, change.at))
        if change.kind not in ("finished", "failed"):
            self._send("a change", lambda: self._set_tags({"spark_elastic.last_change": str(change)}))

    def end(self, result: DriverResult) -> None:
        if self.run_id is None:
            return
        kinds = [event["kind"] for event in result.events]
        tags = {f"spark_elastic.{kind}": str(kinds.count(kind)) for kind in ("lost", "joined", "drained")}
        if result.stopped:
            tags["spark_elastic.stopped"] = result.stopped
        if result.error is not None:
            tags["spark_elastic.error"] = f"{type(result.error).__name__}: {result.error}"
        self._send("the outcome", lambda: self._set_tags(tags))
        self._calls.put(None)
        self._sender.join(END_WAIT_S)
        self._late = self._sender.is_alive()
        if self._late:
            log.warning(
                "the MLflow run of this fit is incomplete: the tracking server has not taken all of it %.0f s after "
                "the end of the training",
                END_WAIT_S,
            )
            if self._owns_run and self._is_active():
                # off this thread's stack, or the next fit would be logged to it
                with contextlib.suppress(Exception), _brief_requests():
                    _mlflow().end_run("FAILED")
        else:
            self._try("the events", lambda: self._log_events(result))
            if result.model is not None:
                self._try("the plot", lambda: self._log_plot(result.model))
                self._try("the model", lambda: self._log_models(result.model))
            self._try("the end of the run", lambda: self._end_run(result.error))

    def _send(self, name: str, call: Callable[[], None]) -> None:
        if self.run_id is not None:
            self._calls.put((name, call))

    def _send_all(self) -> None:
        while (each := self._calls.get()) is not None and not self._late:
            self._try(*each)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        """Make a call; warn of its error, once for each name."""
        try:
            call()
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                log.warning("%s could not be logged to MLflow: %s: %s", name, type(error).__name__, redacted(error))

    def _start_run(self) -> None:
        mlflow, callback = _mlflow(), self._callback
        active = mlflow.active_run()
        search = search_run_id()
        in_search = active is not None and active.info.run_id == search  # whose other fits have runs of their own
        if active is None or callback.nested or in_search:
            experiment, name = None, callback.experiment_name
            if name is not None:
                client = mlflow.MlflowClient()
                found = client.get_experiment_by_name(name)
                experiment = found.experiment_id if found is not None else client.create_experiment(name)
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

        there = self._client.get_run(self.run_id).data.params  # of autologging, or of an earlier fit: they stay
        params = {"estimator": self._run.name, **self._run.settings}
        new = [Param(name, str(value)) for name, value in params.items() if name not in there]
        self._client.log_batch(self.run_id, params=new)

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self.run_id, tags=[RunTag(name, redacted(value)[:5000]) for name, value in tags.items()])

    def _log_metrics(self, values: Mapping[str, float], step: int, at: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(_metric_name(name), value, int(1000 * at), step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _log_events(self, result: DriverResult) -> None:
        client = self._client
        client.log_dict(self.run_id, {"events": [dict(event) for event in result.events]}, "spark_elastic/events.json")
        text = "\n".join(f"{event['seconds']:9.1f} s  {event['text']}" for event in result.events)
        client.log_text(self.run_id, f"{text}\n", "spark_elastic/events.txt")

    def _log_plot(self, model: Any) -> None:
        with contextlib.suppress(MissingExtraError):  # without the extra `plot` there is no picture
            self._client.log_figure(self.run_id, model.plot(), "spark_elastic/plot.png")

    def _log_models(self, model: Any) -> None:
        name = self._callback.registered_model_name
        with self._in_run():
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


def autologging_callbacks(given: Sequence[DriverCallback]) -> list[DriverCallback]:
    """Return a callback that logs epochs and workers to the run of autologging; none if a `MLflowCallback` is given."""
    if any(isinstance(each, MLflowCallback) for each in given) or _mlflow().active_run() is None:
        return []
    callback = MLflowCallback(log_models=[])
    callback.log_settings = False
    return [callback]


def _metric_name(name: str) -> str:
    """Return a name that MLflow takes: one bad name would lose all values of its epoch."""
    clean = _NOT_IN_NAMES.sub("_", name)
    if posixpath.normpath(clean) != clean or clean.startswith(("/", "..")) or clean == ".":
        clean = clean.replace("/", "_").replace("..", "__")
    return clean[:_LONGEST_NAME]


def _mlflow() -> Any:
    return import_module("mlflow")


@contextlib.contextmanager
def _brief_requests() -> Iterator[None]:
    """Let requests of MLflow fail within seconds in the block, unless the user has set their limits."""
    added = {name: value for name, value in _BRIEF.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)

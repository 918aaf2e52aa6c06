"""FitRun: one fit of an estimator, step by step, and everything that has to be released after it."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from spark_elastic import clock
from spark_elastic.data.catalog import delete_unless_used
from spark_elastic.data.columns import Query
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.shared_store import ensure_shared
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError, StateLostError
from spark_elastic.jobs.driver_callbacks import CallbackSession, DriverCallback, DriverResult, DriverRun
from spark_elastic.jobs.job import ElasticJob
from spark_elastic.jobs.settings import RunCall, RunSettings
from spark_elastic.ml import fingerprint, preparation, run_folder
from spark_elastic.ml.datasets import SharedDatasets, check_stored, request_of, written_rows
from spark_elastic.ml.fitted import Fitted
from spark_elastic.ml.model import ElasticModel
from spark_elastic.ml.params import ElasticParams, as_list
from spark_elastic.ml.preparation import Tensors, model_inputs
from spark_elastic.ml.results import FitResults
from spark_elastic.ml.shared_params import READ_OPTIONS
from spark_elastic.ml.training.dry_run import DryRunResult, warn_of_no_prediction
from spark_elastic.ml.training.spec import CheckpointPlan, Training, TrainingResult
from spark_elastic.reporting.descriptions import describe_settings
from spark_elastic.reporting.event_log import event_rows
from spark_elastic.reporting.history import Row
from spark_elastic.reporting.progress import stop_line
from spark_elastic.runs.checkpoints import CHECKPOINTS, Checkpoints
from spark_elastic.runs.folder import new_run_id
from spark_elastic.runs.lease import RunLease
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.own_modules import check_modules, own_modules
from spark_elastic.spark.session import checked_cluster
from spark_elastic.task.reaper import handling
from spark_elastic.trackers import autologging
from spark_elastic.wire.pickling import dumps

DEFAULT_BATCH_SIZE = 32

log = logging.getLogger("spark_elastic.ml")

M = TypeVar("M", bound=ElasticModel)
T = TypeVar("T", bound=Training)

_WITH_CODE = (
    *("model", "optimizer", "loss", "metrics", "train_fn"),
    *("lr_scheduler", "transformation_fn", "custom_objects"),
)
"""Settings that may need modules of the user's own."""
_VALUES = ("TypedStorage", "UntypedStorage", "ndarray")
_OF_CLUSTER = {"storage_options", "run_options", "status_port"}  # these do not distinguish the trainings of a search


class _StopRequest(DriverCallback):
    """Ends the training after the running epoch once it is `requested`."""

    requested = False

    def on_epoch_end(self, row: Row) -> str | None:
        return "interrupted by Ctrl-C" if self.requested else None


class FitRun(ABC, Generic[T, M]):
    """One fit: its rows, run folder, lease and callbacks, which are released when the block ends.

    The steps, in order: `check` and `materialize`, or `check_stored` for rows that were written before; then `dry_run`,
    `train` and `load`. A framework's subclass says how it trains; `given` is the value of a setting.
    """

    deciding: ClassVar[tuple[str, ...]] = (
        *("model", "optimizer", "loss", "loss_weights", "batch_size", "per_worker_batch_size", "transformation_fn"),
        *("gradient_clip_norm", "gradient_clip_value", "gradient_compression", "sync_batch_norm"),
    )
    """Settings that decide the course of a training: it resumes only from checkpoints with the same ones."""
    worker_env: ClassVar[Mapping[str, str]] = {}  # environment variables that workers need before they import anything
    train_fn: ClassVar[staticmethod[[Any], TrainingResult]]  # the function that each worker calls with the training
    dry_run_fn: ClassVar[staticmethod[[Any, Any], DryRunResult]]  # does one step of a copy of a training

    dataset: Dataset
    folder: Store  # of the run
    training: T  # the settings of the training for the workers
    trained: FitResults  # the results of the workers
    _query: Query | None = None  # None: the rows were written before
    _tried: DryRunResult

    def __init__(self, settings: ElasticParams, shared: SharedDatasets | None = None) -> None:
        self._settings = settings
        self._shared = shared  # the datasets of the other fits of the same `fitMultiple`
        self.cluster: Cluster | None = None  # None also if a launcher needs no Spark
        self.lease: RunLease | None = None  # None: no other driver can take the run folder
        self.resume_from: str | None = None  # the name of a checkpoint
        self.seconds: dict[str, float] = {}  # the seconds that the parts of the fit took, by name
        self._began = clock.wall()
        self._events: list[dict[str, Any]] = []
        self._interrupt = _StopRequest() if self.given("on_interrupt") == "return" else None
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> FitRun[T, M]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exits.__exit__(kind, error, at)

    def given(self, name: str) -> Any:
        return self._settings.getOrDefault(name)

    @property
    def _run_options(self) -> Mapping[str, Any]:
        return self.given("run_options") or {}

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = clock.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + clock.monotonic() - start

    @abstractmethod
    def check_framework(self) -> None:
        """Raise `InvalidSettingsError` for settings that are missing, or wrong for this framework."""

    @abstractmethod
    def label_dtypes(self) -> list[str | None]:
        """Return the type that the loss needs of each label; None: as in its column."""

    @abstractmethod
    def make_training(self, store: Store, resume_from: str | None = None) -> T:
        """Return the settings of the training for the workers."""

    @abstractmethod
    def fitted_model(self, fitted: Fitted) -> M:
        """Return the trained model, made of a file of `trained`."""

    def check(self, df: Any) -> None:
        """Check settings, columns and cluster, before anything runs; raise `UsageError` if one has to be changed."""
        if not hasattr(df, "sparkSession"):
            raise InvalidSettingsError(
                f"fit needs a Spark DataFrame, not {type(df).__module__}.{type(df).__name__}; "
                "spark.createDataFrame(...) makes one"
            )
        for name in ("feature_cols", "label_cols"):
            if self.given(name) is None:
                raise InvalidSettingsError(f"{name} is not set; give the names of the columns")
        self.check_settings()
        self.cluster = checked_cluster(df.sparkSession)
        self._query = Query.checked(df, request_of(self.tensors(df.schema), self.given))
        self._check_store()
        self._check_reach()
        if self._run_options.get("launcher") is None and own_modules():  # which the executors have to import
            given = [self.worker_callbacks(), *map(self.given, filter(self._settings.hasParam, _WITH_CODE))]
            try:
                pickled = self.pickled(given)
            except Exception as error:  # the dry run names the setting
                log.debug("own modules are not looked for: %s", error)
            else:
                check_modules(self.cluster, pickled, self._run_options.get("env"))
        self._began = clock.wall()

    def check_stored(self, where: str | Path | Store | Dataset) -> None:
        """Check settings, cluster, and a dataset that was written before, to train on its rows."""
        self.check_settings()
        self.dataset = where if isinstance(where, Dataset) else Dataset.open(where, self.given("storage_options"))
        check_stored(self.dataset, self._settings)
        if self._run_options.get("launcher") is None:
            self.cluster = checked_cluster()
            self._check_store()
            self._check_reach()
        self._exits.enter_context(run_folder.leased_if_possible(self.dataset.store))
        self._began = clock.wall()

    def check_settings(self) -> None:
        """Raise `InvalidSettingsError` for everything that is wrong with the settings alone."""
        self._settings._check_together()
        self.check_framework()
        low, first, high = (self.given(name) for name in ("min_num_proc", "num_proc", "max_num_proc"))
        page, options = self.given("status_port"), self._run_options
        RunSettings(num_proc=first, min_num_proc=low, max_num_proc=high, status_port=page, **options)
        if options.get("launcher") is not None and (first or (low if low == high else None)) is None:
            raise InvalidSettingsError("a LocalLauncher has no slots to count; set num_proc")

    def tensors(self, schema: Any) -> Tensors:
        """Return the tensors to write. Raises `DataError` for columns that cannot be trained on."""
        given, allow_text = self.given, self.given("transformation_fn") is not None
        shapes, dtypes = given("input_shapes"), given("input_dtypes")
        made = preparation.features(schema, given("feature_cols"), shapes, dtypes, allow_text)
        made |= preparation.labels(schema, given("label_cols"), given("label_shapes"), self.label_dtypes(), allow_text)
        if self.given("sample_weight_col") is not None:
            made |= preparation.weight(schema, self.given("sample_weight_col"))
        return made

    def _check_store(self) -> None:
        """Send this package if it is asked for; raise `StoreError` if the driver cannot see files of the executors."""
        if self.cluster is None:
            return
        on_cluster = self._run_options.get("launcher") is None
        if self._run_options.get("ship_package") and (on_cluster or self.cluster.remote):
            self.cluster.apply(None, ship_package=True)
        if on_cluster:
            ensure_shared(self._runs(), self.cluster)

    def _check_reach(self) -> None:
        """Raise a `UsageError` if workers on the cluster could not connect to this program."""
        if self.cluster is not None and self._run_options.get("launcher") is None:
            self.cluster.check_reach(*(self._run_options.get(name) for name in ("driver_host", "driver_port")))

    def pickled(self, value: Any) -> bytes:
        """Pickle settings as they travel to the workers, without the values of tensors and arrays."""
        return dumps(value, lambda each: (int, ()) if type(each).__name__ in _VALUES else NotImplemented)

    def materialize(self) -> None:
        """Write the rows, or find them under the `dataset_id`, and keep them until the run ends."""
        from spark_elastic.jobs.start import prepare_workers

        try:  # executors that keep workers import what these need while the rows are written and tried
            prepare_workers(self._call())
        except Exception as error:  # the job says what is wrong, if it is
            log.debug("nothing is imported ahead: %s", error)
        assert self.cluster is not None
        assert self._query is not None
        with self._timed("write"):
            self.dataset = written_rows(self.cluster, self._query, self._base_store(), self.given, self._shared)
        if self._shared is None:
            self._exits.callback(delete_unless_used, self.dataset.store)
        self._exits.enter_context(run_folder.leased_if_possible(self.dataset.store))

    def dry_run(self) -> None:
        """Open the run folder, and do one step of a copy of the training on the driver.

        Raises as `durable_run` does, and `DataError` or `InvalidSettingsError` if the step fails.
        """
        self._open_folder()
        self.training = self.make_training(self.folder, self.resume_from)
        with self._timed("try"):
            self._tried = self.dry_run_fn(self.training, self.given("inference_fn"))
            self.training = replace(self.training, **self._tried.settings)
            if self.given("prediction") == "auto" and self.given("prediction_col"):
                warn_of_no_prediction(self._tried)

    def _base_store(self) -> Store:
        return Store.create(self.given("store"), self.given("storage_options"))

    def _runs(self) -> Store:
        """Return the parent of the run folders: `checkpoint_dir`, or a folder in the store."""
        checkpoint_dir = self.given("checkpoint_dir")
        if checkpoint_dir is None:
            return self._base_store().sub("runs")
        return Store.create(checkpoint_dir, self.given("storage_options"))

    def _open_folder(self) -> None:
        """Acquire the run folder until the run ends. Without `checkpoint_dir` it is removed then."""
        runs = self._runs()
        if self.given("checkpoint_dir") is None:
            self.folder = self._exits.enter_context(run_folder.transient_run(runs))
            return
        identity = self.identity()
        name = self.given("run_id") or new_run_id()
        if self._shared is not None:  # one of several trainings, each with its own checkpoints
            params = self._settings._paramMap
            names = sorted({param.name for param in params if self._settings._is_given(param.name)} - _OF_CLUSTER)
            name += f"-{fingerprint.digest([identity, {each: self.described(each) for each in names}])}"
        run_id, resume = self.given("run_id"), self.given("resume")
        self.folder = runs.sub(name)
        held = run_folder.durable_run(runs, name, identity, run_id, resume)
        self.lease, self.resume_from = self._exits.enter_context(held)

    def identity(self) -> dict[str, Any]:
        """Return the facts that must be equal for a training to resume from a checkpoint."""
        return {
            **run_folder.identity_of_rows(self.dataset, self.given("seed"), self.given("shuffle")),
            **{name: self.described(name) for name in self.deciding if self._settings._is_given(name)},
        }

    def described(self, name: str) -> str:
        """Describe a setting in words that are equal in every process."""
        buffers = name != "model"  # whose own buffers a checkpoint has
        return fingerprint.described(self.given(name), buffers=buffers)

    def batch_size(self) -> int | None:
        """Return the rows of a global batch; None if they depend on the number of workers."""
        if self.given("per_worker_batch_size") is not None:
            return None
        return DEFAULT_BATCH_SIZE if self.given("batch_size") is None else int(self.given("batch_size"))

    def common_settings(self, store: Store, resume_from: str | None) -> dict[str, Any]:
        """Return the fields of `ml.training.spec.Training`."""
        plan = None
        if self.given("checkpoint_dir") is not None:
            plan = CheckpointPlan(
                every_epochs=self.given("checkpoint_interval"),
                every_seconds=self.given("checkpoint_seconds"),
                keep=self.given("keep_checkpoints"),
                best_of=self.given("checkpoint_best_of"),
                mode=self.given("checkpoint_best_mode"),
            )
        same = (
            *("transformation_fn", "epochs", "shuffle", "seed", "device", "num_threads", "verbose", "allow_nan_loss"),
            *("per_worker_batch_size", "input_shapes", "label_shapes", "loss_is_per_worker", "sync_batch_norm"),
            *("balance", "accumulation_steps", "gradient_clip_norm", "gradient_clip_value", "gradient_compression"),
        )
        return {
            "dataset": self.dataset,
            "store": store,
            "batch_size": self.batch_size(),
            "checkpoints": plan,
            "resume_from": resume_from,
            "driver_decides_s": self._session.decides_within_s,
            "fence": None if self.lease is None else self.lease.fence,
            **{name: self.given(name) for name in same},
            **{name: value for name, value in (self.given("data_options") or {}).items() if name in READ_OPTIONS},
        }

    def worker_callbacks(self) -> list[Any]:
        """Return the callbacks that travel to the workers."""
        return [each for each in as_list(self.given("callbacks")) if not isinstance(each, DriverCallback)]

    @functools.cached_property
    def _session(self) -> CallbackSession:
        """The session that calls the callbacks on the driver."""
        given = [each for each in as_list(self.given("callbacks")) if isinstance(each, DriverCallback)]
        # The fits of a search would all write to the one run that autologging has started for it.
        if autologging.is_on() and self._shared is None:
            from spark_elastic.trackers.mlflow import autologging_callbacks

            given += autologging_callbacks(given)
        if self._interrupt is not None:
            given.append(self._interrupt)
        return CallbackSession(given)

    def train(self) -> None:
        """Train in the workers of a job, again from the newest checkpoint if all workers that had the state are lost.

        Raises as `FitResults.check` does, and `StateLostError` if there is no newer checkpoint.
        """
        session, has_checkpoints = self._session, self.given("checkpoint_dir") is not None
        names = [param.name for param in self._settings.params]
        run = DriverRun(
            name=type(self._settings).__name__,
            settings=describe_settings({name: self._settings.getOrDefault(name) for name in names}),
            epochs=self.given("epochs"),
            run_id=self.given("run_id"),
            resumed=self.resume_from is not None,
        )
        self._exits.enter_context(session.fit(run))
        with self._timed("train"):
            results = None
            while results is None:
                try:
                    results = self._run_job()
                except StateLostError as error:
                    if error is session.raised:
                        raise  # of another fit, which a callback has made
                    if not has_checkpoints:
                        error.message += "; with checkpoint_dir, fit resumes from the last checkpoint by itself"
                        raise
                    newest = Checkpoints(self.folder.sub(CHECKPOINTS)).latest()
                    if newest is None or newest.name == self.training.resume_from:
                        raise
                    log.warning(
                        "every worker that held the state is lost; training resumes from the checkpoint %s", newest.name
                    )
                    self.training = replace(self.training, resume_from=newest.name)
            self.trained = FitResults(self.folder, results)
            self.trained.check(has_checkpoints, self.lease)
        if self.trained.stopped and self.given("verbose"):
            reason = session.stop_reason or self.trained.stopped
            print(stop_line(len(self.trained.history), self.given("epochs"), reason), flush=True)

    def _run_job(self) -> list[Any]:
        """Return the results of the workers of one job, and note its events. An error ends the workers."""
        from spark_elastic.jobs.run import cancelled_on_error
        from spark_elastic.jobs.start import start

        session = self._session
        job = start(self._call(self.training), session if session else None, self.lease)
        try:
            with cancelled_on_error(job):
                return self._results_of(job)
        finally:
            self._events += event_rows(job.changes(), self._began)
            session.note_events(self._events)

    def _results_of(self, job: ElasticJob) -> list[Any]:
        """Wait for a job. Ctrl-C raises, unless `on_interrupt` makes the first one end the training after an epoch."""
        with contextlib.ExitStack() as stack:
            if self._interrupt is not None:  # pyspark's own handler cancels all Spark jobs, the workers' too
                stack.enter_context(handling(signal.SIGINT, signal.default_int_handler))
            while True:
                try:
                    if self._session:
                        self._session.deliver()
                    return job.result()
                except KeyboardInterrupt:
                    if self._interrupt is None or self._interrupt.requested:
                        raise
                    self._interrupt.requested = True
                    said = "spark_elastic: the training ends after this epoch; Ctrl-C again ends it now"
                    print(said, file=sys.stderr)

    def _call(self, *arguments: Any) -> RunCall:
        options = dict(self._run_options)
        if self.worker_env:
            options["env"] = {**self.worker_env, **(options.get("env") or {})}
        if options.get("launcher") is None:
            options["spark"] = self.cluster
        if self.given("device") == "cpu":
            options.setdefault("device", "cpu")
        return RunCall(
            self.train_fn,
            arguments,
            num_proc=self.given("num_proc"),
            min_num_proc=self.given("min_num_proc"),
            max_num_proc=self.given("max_num_proc"),
            verbose=min(2, self.given("verbose")),
            status_port=self.given("status_port"),
            **options,
        )

    def load(self) -> M:
        """Return the trained model, with the history and the events of the fit."""
        tried, trained, events = self._tried, self.trained, tuple(self._events)
        with self._timed("load"):
            written_with = self.dataset.manifest.about.get("settings", {})
            inputs = model_inputs(self.dataset, self.given("input_shapes"))
            names = [] if self._query is None else [name for field in inputs for name in field.columns]
            types = [] if self._query is None else [self._query.df.schema[name].dataType for name in names]
            missing = written_with.get("missing", "error")
            model = self.fitted_model(
                Fitted(
                    inputs=inputs,
                    outputs=tried.outputs,
                    output_positions=tried.output_positions,
                    rule=tried.rule,
                    history=trained.history,
                    events=events,
                    why_not=tried.why_not,
                    pad_to=written_with.get("pad_to", {}),
                    allow_nan=written_with.get("allow_nan", False),
                    columns={name: kind.simpleString() for name, kind in zip(names, types, strict=True)},
                    missing=None if isinstance(missing, str) else missing,
                )
            )
            # The model has the estimator's uid, as in Spark ML, so that param maps of a CrossValidator reach it.
            model._resetUid(self._settings.uid)
            for param in model.params:  # of the output: the model's inputs are in `fitted`
                if param.name != "feature_cols" and self._settings.isSet(param.name):
                    model._set(**{param.name: self.given(param.name)})
        model.fit_seconds = dict(self.seconds)
        self._session.succeeded(
            DriverResult(model=model, history=trained.history, events=events, stopped=trained.stopped)
        )
        return model

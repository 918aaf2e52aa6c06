"""ElasticEstimator: from a DataFrame to a trained model, whatever framework trains it.

`fit` is five steps: check the settings and columns, materialise the rows, dry run of one step on the driver, train
elastically, load the trained model.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pyspark.ml import Estimator

from spark_elastic import clock
from spark_elastic.data.catalog import delete_unless_used
from spark_elastic.data.columns import check_validation
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, InvalidSettingsError, SparkElasticError
from spark_elastic.jobs.driver_callbacks import CallbackSession, DriverCallback, DriverResult, DriverRun
from spark_elastic.jobs.settings import RunCall, RunSettings
from spark_elastic.jobs.tracking import active_run_id, fits_of
from spark_elastic.ml import preparation
from spark_elastic.ml.datasets import SharedDatasets, check_stored_settings, check_tensors, flat_names, model_inputs
from spark_elastic.ml.model import ElasticModel, Fitted
from spark_elastic.ml.params import as_list
from spark_elastic.ml.persistence import Savable
from spark_elastic.ml.preparation import Tensors
from spark_elastic.ml.run_folder import RunFolders, check_room, leased_if_possible
from spark_elastic.ml.shared_params import (
    READ_OPTIONS,
    WRITE_OPTIONS,
    BatchParams,
    FeatureParams,
    GradientParams,
    LabelParams,
    ModelParams,
    OutputParams,
)
from spark_elastic.ml.training.dry_run import DryRunResult, warn_of_no_prediction
from spark_elastic.ml.training.spec import CheckpointPlan
from spark_elastic.ml.training_job import TrainedRun, train
from spark_elastic.reporting.descriptions import describe_settings
from spark_elastic.reporting.event_log import event_rows
from spark_elastic.reporting.progress import stop_line
from spark_elastic.runs.lease import lease_of
from spark_elastic.spark.own_modules import check_modules, own_modules
from spark_elastic.spark.session import checked_cluster
from spark_elastic.trackers import autologging
from spark_elastic.wire.pickling import dumps

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DEFAULT_BATCH_SIZE = 32

log = logging.getLogger("spark_elastic.ml")

M = TypeVar("M", bound=ElasticModel)

_WITH_CODE = (
    *("model", "optimizer", "loss", "metrics", "train_fn"),
    *("lr_scheduler", "transformation_fn", "custom_objects"),
)
"""Settings that may need modules of the user's own."""
_VALUES = ("TypedStorage", "UntypedStorage", "ndarray")
_ESTIMATOR_NAMES = {
    "dtypes": "dtypes= is input_dtypes=[...], with one for each input; labels and weights have to be cast as columns",
    "shapes": "shapes= is input_shapes=[...] and label_shapes=[...]",
    "pad_to": "pad_to= and variable= go into data_options={{...}}",
}
_DATA_OPTION = "{}= goes into data_options={{...}}"
"""Advice for arguments of `materialize` that a `DataError` names in its `settings`: their names in an estimator."""


class FitTimings:
    """The parts of a fit with the seconds that they took; `began` is the begin of the fit, in seconds since 1970."""

    def __init__(self) -> None:
        self.began = clock.wall()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = clock.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + clock.monotonic() - start


class ElasticEstimator(
    ModelParams,
    FeatureParams,
    LabelParams,
    BatchParams,
    GradientParams,
    RunFolders,
    OutputParams,
    Savable,
    Estimator[M],
):
    """Base of the estimators. A subclass says how its framework trains."""

    TOGETHER: tuple[str, ...] = ("model", "optimizer", "lr_scheduler")

    # --- for frameworks ---------------------------------------------------------------------------

    def _check_framework(self) -> None:
        """Raise `InvalidSettingsError` for settings that are missing, or wrong for this framework."""
        raise NotImplementedError

    def _label_dtypes(self) -> list[str | None]:
        """Return the type that the loss needs of each label; None: as in its column."""
        return []

    def _training(self, dataset: Dataset, run: Store, resume_from: str | None) -> Any:
        """Return the settings of the training for the workers."""
        raise NotImplementedError

    def _dry_run(self, training: Any) -> DryRunResult:
        """Do one step of a copy on the first rows. Raises `DataError` or `InvalidSettingsError` if that fails."""
        raise NotImplementedError

    def _model_nbytes(self, training: Any) -> int:
        """Return about the size of the trained model's file."""
        raise NotImplementedError

    def _train_fn(self) -> Callable[[Any], Any]:
        """Return the function that each worker calls with `_training`; it returns a `TrainingResult`."""
        raise NotImplementedError

    def _fitted_model(self, training: Any, fitted: Fitted, read: Callable[[str], bytes]) -> M:
        """Return the trained model; `read` returns a file that the workers wrote."""
        raise NotImplementedError

    def _worker_env(self) -> dict[str, str]:
        """Return environment variables that workers need before they import anything."""
        return {}

    # --- fit, in five steps -----------------------------------------------------------------------

    @overload
    def fit(self, dataset: DataFrame, params: Mapping[Any, Any] | None = None) -> M: ...

    @overload
    def fit(self, dataset: DataFrame, params: Sequence[Mapping[Any, Any]]) -> list[M]: ...

    def fit(self, dataset: DataFrame, params: Any = None) -> M | list[M]:
        """Fit a model, as in Spark ML.

        Args:
            dataset: A DataFrame.
            params: Settings for this fit alone: a dict, or a list of dicts, which gives a list of models.

        Returns:
            The fitted model, or a list of them.

        Raises:
            UsageError: A setting, a column or the cluster has to be changed; no worker was started.
            JobError: The training could not continue. A `UserFunctionError` has the frames of your code.
        """
        __tracebackhide__ = True  # IPython leaves out such frames
        try:
            fitted: M | list[M] = super().fit(dataset, params)
            return fitted
        except (SparkElasticError, KeyboardInterrupt) as error:
            if self._given("verbose") > 1:
                raise
            # the caller's frames are followed by none of this package's
            raise error.with_traceback(None) from error.__cause__

    def _fit(self, dataset: Any) -> M:
        from spark_elastic.jobs.start import prepare_workers

        context, tensors = self._check(dataset)
        timings = FitTimings()
        try:  # executors that keep workers import what these need while the rows are written and tried
            prepare_workers(self._call(context))
        except Exception as error:  # the job says what is wrong, if it is
            log.debug("nothing is imported ahead: %s", error)
        with self._materialised(dataset, tensors, timings) as rows:
            return self._fit_rows(rows, context, timings)

    def _fit_rows(self, rows: Dataset, context: Any, timings: FitTimings) -> M:
        """Do the steps from the dry run on, which `fit` and `from_dataset_path` share."""
        with self._run_folder(rows) as (run, resume_from):
            training = self._training(rows, run, resume_from)
            with timings.part("try"):
                dry_run = self._dry_run(training)
                training = replace(training, **dry_run.settings)
                if self._given("prediction") == "auto" and self._given("prediction_col"):
                    warn_of_no_prediction(dry_run)
            check_room(run, self._model_nbytes(training), training)
            session = CallbackSession(self._driver_callbacks())
            with session.fit(self._driver_run(resume_from)):
                events: list[Any] = []
                with timings.part("train"):
                    trained = train(
                        training,
                        lambda each: self._run_job(each, context, timings.began, events, session),
                        events,
                        session,
                        has_checkpoints=self._given("checkpoint_dir") is not None,
                    )
                if trained.stopped and self._given("verbose"):
                    reason = session.stop_reason or trained.stopped
                    print(stop_line(len(trained.history), self._given("epochs"), reason), flush=True)
                with timings.part("load"):
                    model = self._load(training, rows, dry_run, trained)
                model.fit_seconds = dict(timings.seconds)
                session.succeeded(
                    DriverResult(model=model, history=trained.history, events=trained.events, stopped=trained.stopped)
                )
        return model

    def _driver_run(self, resume_from: str | None) -> DriverRun:
        """Return this fit as callbacks on the driver see it."""
        settings = describe_settings({param.name: self.getOrDefault(param) for param in self.params})
        name, epochs, run_id = type(self).__name__, self._given("epochs"), self._given("run_id")
        return DriverRun(name=name, settings=settings, epochs=epochs, run_id=run_id, resumed=resume_from is not None)

    def from_dataset_path(self, where: str | Path | Store | Dataset, params: Mapping[Any, Any] | None = None) -> M:
        """Fit on a dataset that `spark_elastic.materialize` wrote, with tensors "features_0", ..., "label_0", ...

        Args:
            where: The dataset's folder, or the dataset itself. It is neither changed nor removed.
            params: Settings for this fit alone, as of `fit`.

        Returns:
            The model, as `fit` does.

        Raises:
            DatasetError: There is no complete dataset, or it has other tensors than the settings require.
            InvalidSettingsError: A setting says how rows are written, but these are written already.
        """
        estimator = self.copy(dict(params)) if params else self
        estimator._check_complete(from_columns=False)
        rows = where if isinstance(where, Dataset) else Dataset.open(where, estimator._given("storage_options"))
        check_tensors(rows)
        check_stored_settings(rows, estimator)
        context = checked_cluster() if estimator._launcher() is None else None
        if context is not None:
            estimator._check_shared(context)
        with leased_if_possible(rows.store):
            return estimator._fit_rows(rows, context, FitTimings())

    def fitMultiple(self, dataset: Any, paramMaps: Sequence[Any]) -> Iterator[tuple[int, M]]:
        """Fit once for each param map, as in Spark ML. Fits on the same columns share one written dataset."""
        estimator = self.copy()
        estimator._shared_datasets = shared = SharedDatasets(len(paramMaps))
        tracked = active_run_id()

        def fit(index: int) -> tuple[int, Any]:
            try:
                with fits_of(tracked):
                    return index, estimator.fit(dataset, paramMaps[index])
            finally:
                shared.done()

        # Several threads of a CrossValidator draw from it, which a `map` allows and a generator does not.
        return map(fit, range(len(paramMaps)))

    # --- step 1: check ----------------------------------------------------------------------------

    def _check(self, dataset: Any) -> tuple[Any, Tensors]:
        """Return the cluster and the tensors to write, if all that `fit` needs is fit for use."""
        if not hasattr(dataset, "sparkSession"):
            raise InvalidSettingsError(
                f"fit needs a Spark DataFrame, not {type(dataset).__module__}.{type(dataset).__name__}; "
                "spark.createDataFrame(...) makes one"
            )
        self._check_complete(from_columns=True)
        if dataset.isStreaming:
            raise DataError("fit cannot read a streaming DataFrame, which has no end; write it to a table first")
        context = checked_cluster(dataset.sparkSession)
        tensors = self._tensors(dataset.schema)
        self._check_shared(context)
        self._check_own_modules(context)
        return context, tensors

    def _check_own_modules(self, context: Any) -> None:
        """Raise `NotPicklableError` if executors cannot import a module of the user's own that the settings need."""
        if self._launcher() is not None or not own_modules():
            return
        given = [self._worker_callbacks(), *(self._given(name) for name in _WITH_CODE if self.hasParam(name))]
        try:
            pickled = self._pickled(given)
        except Exception as error:  # the dry run names the setting
            log.debug("own modules are not looked for: %s", error)
            return
        check_modules(context, pickled, (self._given("run_options") or {}).get("env"))

    def _pickled(self, value: Any) -> bytes:
        """Pickle settings as they travel to the workers, without the values of tensors and arrays."""
        return dumps(value, lambda each: (int, ()) if type(each).__name__ in _VALUES else NotImplemented)

    def _check_complete(self, from_columns: bool) -> None:
        """Raise `InvalidSettingsError` for everything that is wrong with the settings alone."""
        if from_columns:
            for name in ("feature_cols", "label_cols"):
                if self._given(name) is None:
                    raise InvalidSettingsError(f"{name} is not set; give the names of the columns")
        self._check_together()
        self._check_framework()
        options = self._given("run_options") or {}
        low, first, high = (self._given(name) for name in ("min_num_proc", "num_proc", "max_num_proc"))
        page = self._given("status_port")
        RunSettings(num_proc=first, min_num_proc=low, max_num_proc=high, status_port=page, **options)
        if self._launcher() is not None and (first or (low if low == high else None)) is None:
            raise InvalidSettingsError("a LocalLauncher has no slots to count; set num_proc")

    def _tensors(self, schema: Any) -> Tensors:
        """Return the tensors to write. Raises `DataError` for columns that cannot be trained on."""
        given = (self._given(name) for name in ("feature_cols", "input_shapes", "input_dtypes"))
        made = preparation.features(schema, *given)
        made |= preparation.labels(schema, self._given("label_cols"), self._given("label_shapes"), self._label_dtypes())
        if self._given("transformation_fn") is None:
            for name in ("feature_cols", "label_cols"):
                preparation.check_numbers(schema, flat_names(self._given(name)), name)
        if self._given("sample_weight_col") is not None:
            made |= preparation.weight(schema, self._given("sample_weight_col"))
        if isinstance(self._given("validation"), str):
            check_validation(schema, self._given("validation"))
        return made

    # --- step 2: materialise ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _materialised(self, dataset: Any, tensors: Tensors, timings: FitTimings) -> Iterator[Dataset]:
        """Write the rows, or find them under the `dataset_id`, and keep them for as long as the block runs."""
        with timings.part("write"):
            if (shared := self._shared_datasets) is None:
                rows = self._write(dataset, tensors)
            else:
                key = json.dumps(self._write_settings(tensors), sort_keys=True, default=repr)
                rows = shared.get(key, lambda: self._write(dataset, tensors))
        try:
            with leased_if_possible(rows.store):
                yield rows
        finally:
            if shared is None:
                delete_unless_used(rows.store)

    def _write_settings(self, tensors: Tensors) -> dict[str, Any]:
        """Return the arguments of `materialize` that decide what is written."""
        options = self._given("data_options") or {}
        return {
            "tensors": tensors.columns,
            "dtypes": tensors.dtypes,
            "shapes": tensors.shapes,
            "validation": self._given("validation"),
            "seed": self._given("seed"),
            **{name: options[name] for name in WRITE_OPTIONS if name in options},
        }

    def _write(self, dataset: Any, tensors: Tensors) -> Dataset:
        from spark_elastic.data.materialization import materialize

        settings = self._write_settings(tensors)
        # the folds of a CrossValidator are other rows each, so no name may find one in place of another
        name = self._given("dataset_id") if self._shared_datasets is None else None
        try:
            return materialize(
                dataset,
                settings.pop("tensors"),
                store=self._base_store(),
                dataset_id=name,
                keep=bool(self._given("keep_dataset")) or name is not None,
                verbose=self._given("verbose"),
                **settings,
            )
        except DataError as error:
            advice = [_ESTIMATOR_NAMES.get(name, _DATA_OPTION).format(name) for name in getattr(error, "settings", ())]
            if advice:
                error.message += f"\n(of an estimator: {'; '.join(advice)})"
            raise

    # --- step 4: train (step 3, the dry run, is the framework's) ----------------------------------

    def _run_job(
        self, training: Any, context: Any, began: float, events: list[Any], session: CallbackSession
    ) -> list[Any]:
        """Return the results of the workers, and append the job's events to `events`. An error ends the workers."""
        from spark_elastic.jobs.run import cancelled_on_error
        from spark_elastic.jobs.start import start

        call = self._call(context, training)
        job = start(call, session if session else None)
        lease = lease_of(training.store)
        try:
            with cancelled_on_error(job), contextlib.nullcontext() if lease is None else lease.on_taken(job.cancel):
                if session:
                    session.deliver()
                return job.result()
        finally:
            events += event_rows(job.changes(), began)
            session.note_events(events)

    def _call(self, context: Any, *arguments: Any) -> RunCall:
        """Return the call of `run` for the workers."""
        options = dict(self._given("run_options") or {})
        if env := self._worker_env():
            options["env"] = {**env, **(options.get("env") or {})}
        if options.get("launcher") is None:
            options["spark"] = context
        if self._given("device") == "cpu":
            options.setdefault("device", "cpu")
        return RunCall(
            self._train_fn(),
            arguments,
            num_proc=self._given("num_proc"),
            min_num_proc=self._given("min_num_proc"),
            max_num_proc=self._given("max_num_proc"),
            verbose=min(2, self._given("verbose")),
            status_port=self._given("status_port"),
            **options,
        )

    def _batch_size(self) -> int | None:
        """Return the rows of a global batch; None if they depend on the number of workers."""
        if self._given("per_worker_batch_size") is not None:
            return None
        return DEFAULT_BATCH_SIZE if self._given("batch_size") is None else int(self._given("batch_size"))

    def _common_settings(self, dataset: Dataset, run: Store, resume_from: str | None) -> dict[str, Any]:
        """Return the fields of `ml.training.spec.Training`."""
        options = self._given("data_options") or {}
        plan = None
        if self._given("checkpoint_dir") is not None:
            plan = CheckpointPlan(
                every_epochs=self._given("checkpoint_interval"),
                every_seconds=self._given("checkpoint_seconds"),
                keep=self._given("keep_checkpoints"),
                best_of=self._given("checkpoint_best_of"),
                mode=self._given("checkpoint_best_mode"),
            )
        same = (
            *("transformation_fn", "epochs", "shuffle", "seed", "device", "num_threads", "verbose", "allow_nan_loss"),
            *("per_worker_batch_size", "input_shapes", "label_shapes", "loss_is_per_worker", "sync_batch_norm"),
        )
        return {
            "dataset": dataset,
            "store": run,
            "batch_size": self._batch_size(),
            "accumulation": self._given("accumulation_steps"),
            "clip_norm": self._given("gradient_clip_norm"),
            "clip_value": self._given("gradient_clip_value"),
            "compression": self._given("gradient_compression"),
            "checkpoints": plan,
            "resume_from": resume_from,
            "driver_decides_s": CallbackSession(self._driver_callbacks()).decides_within_s,
            "fence": None if (lease := lease_of(run)) is None else lease.fence,
            **{name: self._given(name) for name in same},
            **{name: options[name] for name in READ_OPTIONS if name in options},
        }

    def _worker_callbacks(self) -> list[Any]:
        """Return the callbacks that travel to the workers."""
        return [each for each in as_list(self._given("callbacks")) if not isinstance(each, DriverCallback)]

    def _driver_callbacks(self) -> list[DriverCallback]:
        """Return the callbacks that stay on the driver."""
        given = [each for each in as_list(self._given("callbacks")) if isinstance(each, DriverCallback)]
        # The fits of a search would all write to the one run that autologging has started for it.
        if autologging.is_on() and self._shared_datasets is None:
            from spark_elastic.trackers.mlflow import autologging_callbacks

            given += autologging_callbacks(given)
        return given

    # --- step 5: load -----------------------------------------------------------------------------

    def _load(self, training: Any, rows: Dataset, dry_run: DryRunResult, trained: TrainedRun) -> M:
        written_with = rows.manifest.about.get("settings", {})
        fitted = Fitted(
            inputs=model_inputs(rows, self._given("input_shapes")),
            outputs=dry_run.outputs,
            taken=dry_run.taken,
            rule=dry_run.rule,
            history=trained.history,
            events=trained.events,
            why_not=dry_run.why_not,
            pad_to=written_with.get("pad_to", {}),
            allow_nan=written_with.get("allow_nan", False),
        )
        model = self._fitted_model(training, fitted, trained.read)
        # The model has the estimator's uid, as in Spark ML, so that param maps of a CrossValidator reach it.
        model._resetUid(self.uid)
        for param in OutputParams().params:
            if self.isSet(param.name):
                model._set(**{param.name: self._given(param.name)})
        return model

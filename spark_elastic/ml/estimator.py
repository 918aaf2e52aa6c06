"""ElasticEstimator: from a DataFrame to a trained model, whatever framework trains it.

validate -> write the rows -> try the model on the first of them -> train elastically -> load what was trained
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.ml import Estimator

from spark_elastic import clock
from spark_elastic.data.catalog import Limits
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import MANIFEST_NAME
from spark_elastic.data.spark_jobs import refuse_connect
from spark_elastic.data.store import Store
from spark_elastic.driver import preflight
from spark_elastic.errors import (
    DataError,
    DatasetError,
    InvalidSettingsError,
    LossNotFiniteError,
    RunTakenError,
    StateLostError,
    StoreError,
)
from spark_elastic.jobs.settings import RunSettings
from spark_elastic.ml import preparation
from spark_elastic.ml.datasets import (
    Fits,
    SharedSets,
    check_tensors,
    give_back,
    is_found_again,
    model_inputs,
    nan_of,
    padding_of,
    remove_unless_used,
)
from spark_elastic.ml.model import ElasticModel, Fitted
from spark_elastic.ml.outputs import OutputShape
from spark_elastic.ml.persistence import Savable
from spark_elastic.ml.preparation import WEIGHT, Tensors
from spark_elastic.ml.run_folder import RunFolders, check_room, leased_if_possible
from spark_elastic.ml.run_lease import RunLease, lease_of
from spark_elastic.ml.shared_params import (
    READ_OPTIONS,
    WRITE_OPTIONS,
    FeatureParams,
    LabelParams,
    OutputParams,
    TrainingParams,
)
from spark_elastic.ml.training.spec import CheckpointPlan
from spark_elastic.reporting.history import History
from spark_elastic.reporting.plot import event_rows

DEFAULT_BATCH_SIZE = 32

log = logging.getLogger("spark_elastic.ml")
_ADVICE = {
    "dtypes": "dtypes= is input_dtypes=[...], with one for each input; labels and weights have to be cast as columns",
    "shapes": "shapes= is input_shapes=[...] and label_shapes=[...]",
    "pad_to": "pad_to= and variable= go into data_options={{...}}",
}
_DATA_OPTION = "{}= goes into data_options={{...}}"
"""What arguments of `materialize`, which errors name, are called in an estimator."""


@dataclass(frozen=True)
class TrialRun:
    """What the first rows have shown. outputs: of the model in `transform`; (): `why_not` says why it has none."""

    outputs: tuple[OutputShape, ...]
    rule: str | None = None
    why_not: str = ""


@dataclass
class Parts:
    """Seconds that the parts of a fit took, by name. began: in seconds since 1970."""

    began: float = field(default_factory=clock.wall)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = clock.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + clock.monotonic() - start


class ElasticEstimator(FeatureParams, LabelParams, TrainingParams, RunFolders, OutputParams, Savable, Estimator):
    """Base of the estimators. A subclass says how its framework trains."""

    TOGETHER: tuple[str, ...] = ("model", "optimizer", "lr_scheduler")

    # What a framework adds.

    def _check_framework(self) -> None:
        """Raises: InvalidSettingsError: the settings of this framework, missing ones too."""
        raise NotImplementedError

    def _label_dtypes(self) -> list[str | None]:
        """What each label has to be stored as for its loss; None: as its column is."""
        return []

    def _training(self, dataset: Dataset, run: Store, resume_from: str | None) -> Any:
        """What the workers are told."""
        raise NotImplementedError

    def _try(self, training: Any) -> TrialRun:
        """One step of a copy on the first rows. Raises: DataError, InvalidSettingsError: what does not fit."""
        raise NotImplementedError

    def _model_nbytes(self, training: Any) -> int:
        """About as many bytes as the file of the trained model will have."""
        raise NotImplementedError

    def _train_fn(self) -> Callable[[Any], Any]:
        """What each worker calls with `_training`; returns something with a `history`."""
        raise NotImplementedError

    def _fitted_model(self, training: Any, fitted: Fitted, trained: Callable[[str], bytes]) -> ElasticModel:
        """The model that was trained. trained: the file of this name, which the workers have left."""
        raise NotImplementedError

    def _worker_env(self) -> dict[str, str]:
        """Environment variables that workers need before they import anything."""
        return {}

    # What users call, beside fit(df) of Spark ML.

    def from_dataset_path(self, where: str | Path | Store | Dataset, params: Mapping[Any, Any] | None = None) -> Any:
        """Fit on a set that `spark_elastic.materialize` has written, with tensors "features_0", ..., "label_0", ...

        where: the set's folder, or the set itself. It is neither changed nor removed.
        Returns: the model, as of `fit`.
        Raises:
            DatasetError: there is no complete set, or it has other tensors than the settings speak of.
            InvalidSettingsError: what is set says how rows are written, and these are.
        """
        estimator = self.copy(dict(params)) if params else self
        estimator._check_complete(from_columns=False)
        dataset = (
            where if isinstance(where, Dataset) else Dataset.open(where, estimator.getOrDefault("storage_options"))
        )
        check_tensors(dataset)
        estimator._check_set(dataset)
        session = None if estimator._launcher() is not None else preflight.check_spark(None)
        if session is not None:
            estimator._check_shared(session)
        with leased_if_possible(dataset.store), estimator._run_folder(dataset) as (run, resume_from):
            return estimator._train(dataset, run, resume_from, session, Parts())

    def fitMultiple(self, dataset: Any, paramMaps: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """As in Spark ML. The rows are written once for all param maps that train on the same columns."""
        refuse_connect(dataset)
        estimator = self.copy()
        # The folds of a CrossValidator are random, and cached only for as long as it needs them.
        passing = not estimator._keeps_rows() and not dataset._jdf.queryExecution().analyzed().deterministic()
        estimator._sets = sets = SharedSets(len(paramMaps), removed=passing)

        def fit(index: int) -> Any:
            try:
                return estimator.fit(dataset, paramMaps[index])
            finally:
                sets.done()

        return Fits(fit, len(paramMaps))

    def _fit(self, dataset: Any) -> Any:
        if not hasattr(dataset, "sparkSession"):
            raise InvalidSettingsError(
                f"fit needs a Spark DataFrame, not {type(dataset).__module__}.{type(dataset).__name__}; "
                "spark.createDataFrame(...) makes one"
            )
        self._check_complete(from_columns=True)
        if dataset.isStreaming:
            raise DataError("fit needs a DataFrame with an end, and this one is streaming; write it to a table first")
        context = preflight.check_spark(dataset.sparkSession)
        tensors = self._tensors(dataset.schema)
        self._check_shared(context)
        parts = Parts()
        with parts.part("write"):
            written = self._written(dataset, tensors)
        try:
            with leased_if_possible(written.store):
                if not written.store.exists(MANIFEST_NAME):  # the end of another process came before our lease
                    give_back(written)
                    with parts.part("write"):
                        written = self._written(dataset, tensors)
                with self._run_folder(written) as (run, resume_from):
                    return self._train(written, run, resume_from, context, parts)
        finally:
            # What a later fit finds again stays for it, as long as there is room.
            if self._sets is None and not self._keeps_rows():
                if not is_found_again(dataset, written):
                    remove_unless_used(written)
                give_back(written)

    # Checks.

    def _check_complete(self, from_columns: bool) -> None:
        """All that can be known before any job. Raises: InvalidSettingsError."""
        if from_columns:
            for name in ("feature_cols", "label_cols"):
                if self.getOrDefault(name) is None:
                    raise InvalidSettingsError(f"{name} is not set; which columns are it?")
            Limits.of_environment(os.environ)  # the end of the fit could not use it
        self._check_together()
        self._check_framework()
        options = self.getOrDefault("run_options") or {}
        low, first, high = (self.getOrDefault(name) for name in ("min_num_proc", "num_proc", "max_num_proc"))
        RunSettings(num_proc=first, min_num_proc=low, max_num_proc=high, **options)
        if self._launcher() is not None and (first or (low if low == high else None)) is None:
            raise InvalidSettingsError("a LocalLauncher has no slots to count; set num_proc")
        if not isinstance(self.getOrDefault("store"), (str, Path, Store, type(None))):
            raise InvalidSettingsError(f"store must be a path, a URI or a Store, not {self.getOrDefault('store')!r}")

    def _check_set(self, dataset: Dataset) -> None:
        """Settings about columns that are made must be true of a set that is there. Raises: as `from_dataset_path`."""
        options = self.getOrDefault("data_options") or {}
        of_writing = [name for name in ("dataset_id", "keep_dataset") if self.isSet(name) and self.getOrDefault(name)]
        if of_writing := [*of_writing, *(f"data_options[{name!r}]" for name in WRITE_OPTIONS if name in options)]:
            raise InvalidSettingsError(
                f"{', '.join(of_writing)}: from_dataset_path writes no rows, so leave this out, or use it where they "
                "are written"
            )
        columns = {each.name: list(each.columns) for each in dataset.layout.fields}
        for setting, prefix in (("feature_cols", "features_"), ("label_cols", "label_"), ("sample_weight_col", WEIGHT)):
            given = self.getOrDefault(setting)
            stored = [name for tensor, names in columns.items() if tensor.startswith(prefix) for name in names]
            if given is not None and _flat([given] if isinstance(given, str) else given) != stored:
                raise DatasetError(
                    f"{setting}={given!r}, but the set in {dataset.store.url} was made of {stored}; set it to what "
                    "was stored, or to None"
                )
        stored = [each.dtype for each in preparation.numbered("features_", {f.name: f for f in dataset.layout.fields})]
        for number, (dtype, has) in enumerate(zip(self.getOrDefault("input_dtypes") or (), stored, strict=False)):
            if dtype is not None and np.dtype(dtype) != np.dtype(has):
                raise DatasetError(
                    f"input_dtypes={self.getOrDefault('input_dtypes')!r}, but features_{number} of the set in "
                    f"{dataset.store.url} is {np.dtype(has).name}; set it to what was stored, or to None"
                )
        if self.getOrDefault("validation") is not None and "validation" not in dataset.splits:
            raise DatasetError(
                f"validation={self.getOrDefault('validation')!r}, but the set in {dataset.store.url} has no split of "
                "that name; it was written without validation="
            )

    def _tensors(self, schema: Any) -> Tensors:
        """Raises: DataError: columns that cannot be trained on."""
        given = (self.getOrDefault(name) for name in ("feature_cols", "input_shapes", "input_dtypes"))
        made = preparation.features(schema, *given)
        made |= preparation.labels(
            schema, self.getOrDefault("label_cols"), self.getOrDefault("label_shapes"), self._label_dtypes()
        )
        if self.getOrDefault("transformation_fn") is None:
            for name in ("feature_cols", "label_cols"):
                preparation.check_numbers(schema, _flat(self.getOrDefault(name)), name)
        if self.getOrDefault("sample_weight_col") is not None:
            made |= preparation.weight(schema, self.getOrDefault("sample_weight_col"))
        if isinstance(self.getOrDefault("validation"), str):
            preparation.check_validation(schema, self.getOrDefault("validation"))
        return made

    # The rows.

    def _written(self, dataset: Any, tensors: Tensors) -> Dataset:
        if self._sets is None:
            return self._write(dataset, tensors)
        wanted = json.dumps(self._write_settings(tensors), sort_keys=True, default=repr)
        return self._sets.get(wanted, lambda: self._write(dataset, tensors))

    def _keeps_rows(self) -> bool:
        return bool(self.getOrDefault("keep_dataset")) or self.getOrDefault("dataset_id") is not None

    def _write_settings(self, tensors: Tensors) -> dict[str, Any]:
        """The arguments of `materialize` that decide what is written."""
        options = self.getOrDefault("data_options") or {}
        return {
            "tensors": tensors.columns,
            "dtypes": tensors.dtypes,
            "shapes": tensors.shapes,
            "validation": self.getOrDefault("validation"),
            "seed": self.getOrDefault("seed"),
            **{name: options[name] for name in WRITE_OPTIONS if name in options},
        }

    def _write(self, dataset: Any, tensors: Tensors) -> Dataset:
        """Unless told otherwise the rows stay for later fits of this process, and are removed when it ends."""
        from spark_elastic.data.materialization import materialize

        settings = self._write_settings(tensors)
        try:
            return materialize(
                dataset,
                settings.pop("tensors"),
                store=self._base_store(),
                dataset_id=self.getOrDefault("dataset_id"),
                keep=self._keeps_rows() or None,
                verbose=self.getOrDefault("verbose"),
                **settings,
            )
        except DataError as error:
            if advice := [_ADVICE.get(name, _DATA_OPTION).format(name) for name in getattr(error, "settings", ())]:
                error.message += f"\n(of an estimator: {'; '.join(advice)})"
            raise

    # The run.

    def _train(self, dataset: Dataset, run: Store, resume_from: str | None, context: Any, parts: Parts) -> Any:
        training = self._training(dataset, run, resume_from)
        with parts.part("try"):
            trial = self._try(training)
        with parts.part("train"):
            check_room(run, self._model_nbytes(training), training)
            results, events = self._run_to_the_end(training, dataset, run, resume_from, context, parts.began)
            self._refuse_diverged(results, run)
        unsaved: Mapping[str, bytes] = next(
            (result.unsaved for result in results if result is not None and result.unsaved), {}
        )
        if (lease := lease_of(run)) is not None:
            self._check_lease(lease, unsaved)
        with parts.part("load"):
            history: History = next(result.history for result in results if result is not None)
            inputs = model_inputs(dataset, self.getOrDefault("input_shapes"))
            fitted = Fitted(
                inputs,
                trial.outputs,
                trial.rule,
                history,
                tuple(events),
                trial.why_not,
                padding_of(dataset),
                nan_of(dataset),
            )
            model = self._fitted_model(training, fitted, lambda name: self._trained(run, name, unsaved))
        model.fit_seconds = dict(parts.seconds)
        self._hand_on(model)
        return model

    @staticmethod
    def _check_lease(lease: RunLease, unsaved: Mapping[str, bytes]) -> None:
        """What lies in the folder may be another driver's by now. Raises: RunTakenError; what the storage raises."""
        try:
            lease.check()
        except RunTakenError:
            raise
        except Exception as error:  # each kind of storage has its own
            if not unsaved:
                raise
            log.warning("whose run this is by now cannot be told: %s", error)  # the model did not come out of it

    def _refuse_diverged(self, results: Sequence[Any], run: Store) -> None:
        """Raises: LossNotFiniteError."""
        diverged = next((result.diverged for result in results if result is not None), None)
        if diverged is not None:
            raise LossNotFiniteError(
                loss=diverged.loss,
                step=diverged.step + 1,
                epoch=diverged.epoch,
                ranks=[rank for rank, result in enumerate(results) if result is not None and result.lost_here],
                size=len(results),
                checkpoints="" if self.getOrDefault("checkpoint_dir") is None else run.url,
            )

    def _run_to_the_end(
        self, training: Any, dataset: Dataset, run: Store, resume_from: str | None, context: Any, began: float
    ) -> tuple[list[Any], list[Any]]:
        """Where all that had the state are lost, go on from the newest checkpoint, as long as there are newer ones."""
        events: list[Any] = []
        while True:
            try:
                return self._run_job(training, context, began, events), events
            except StateLostError as error:
                if self.getOrDefault("checkpoint_dir") is None:
                    error.message += "; with checkpoint_dir, fit goes on from the last checkpoint by itself"
                    raise
                newest = self._latest_checkpoint(run)
                if newest is None or newest == resume_from:
                    raise
                resume_from = newest
                training = self._training(dataset, run, resume_from)

    def _run_job(self, training: Any, context: Any, began: float, events: list[Any]) -> list[Any]:
        """What the workers returned; what became of them is added to `events`. Ctrl-C ends the workers."""
        from spark_elastic.jobs.run import run_async

        options = dict(self.getOrDefault("run_options") or {})
        if env := self._worker_env():
            options["env"] = {**env, **(options.get("env") or {})}
        if options.get("launcher") is None:
            options["spark"] = context
        if self.getOrDefault("device") == "cpu":
            options.setdefault("device", "cpu")
        job = run_async(
            self._train_fn(),
            (training,),
            num_proc=self.getOrDefault("num_proc"),
            min_num_proc=self.getOrDefault("min_num_proc"),
            max_num_proc=self.getOrDefault("max_num_proc"),
            verbose=min(2, self.getOrDefault("verbose")),
            **options,
        )
        lease = lease_of(training.store)
        try:
            with contextlib.nullcontext() if lease is None else lease.told(job.cancel):
                return job.result()
        except BaseException as error:
            if not job.done():
                job.cancel(f"interrupted by {type(error).__name__}")
            raise
        finally:
            events += event_rows(job.changes(), began)

    def _hand_on(self, model: ElasticModel) -> None:
        """The model has the estimator's uid, as in Spark ML, so that param maps of a CrossValidator reach it."""
        model._resetUid(self.uid)
        for param in OutputParams().params:
            if self.isSet(param.name):
                model._set(**{param.name: self.getOrDefault(param.name)})

    # What trainings of all frameworks are told.

    def _common_settings(self, dataset: Dataset, run: Store, resume_from: str | None) -> dict[str, Any]:
        """The fields of `ml.training.spec.Training`."""
        batch_size, per_worker = self._batch_sizes()
        options = self.getOrDefault("data_options") or {}
        same = ("transformation_fn", "epochs", "shuffle", "seed", "device", "num_threads", "verbose", "allow_nan_loss")
        return {
            "dataset": dataset,
            "store": run,
            "batch_size": batch_size,
            "per_worker_batch_size": per_worker,
            "accumulation": self.getOrDefault("accumulation_steps"),
            "clip_norm": self.getOrDefault("gradient_clip_norm"),
            "clip_value": self.getOrDefault("gradient_clip_value"),
            "compression": self.getOrDefault("gradient_compression"),
            "sync_batch_norm": self.getOrDefault("sync_batch_norm") is not False,
            "checkpoints": self._checkpoint_plan(),
            "resume_from": resume_from,
            "fence": None if (lease := lease_of(run)) is None else lease.fence,
            "input_shapes": self.getOrDefault("input_shapes"),
            "label_shapes": self.getOrDefault("label_shapes"),
            **{name: self.getOrDefault(name) for name in same},
            **{name: options[name] for name in READ_OPTIONS if name in options},
        }

    def _checkpoint_plan(self) -> CheckpointPlan | None:
        if self.getOrDefault("checkpoint_dir") is None:
            return None
        return CheckpointPlan(
            every_epochs=self.getOrDefault("checkpoint_interval"),
            every_seconds=self.getOrDefault("checkpoint_seconds"),
            keep=self.getOrDefault("keep_checkpoints"),
            best_of=self.getOrDefault("checkpoint_best_of"),
            mode=self.getOrDefault("checkpoint_best_mode"),
        )

    def _callbacks(self) -> list[Any]:
        """As they were given; one may stand alone."""
        given = self.getOrDefault("callbacks")
        return [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]

    # What they leave in the run's folder.

    def _trained(self, run: Store, name: str, unsaved: Mapping[str, bytes]) -> bytes:
        """The file with what was learnt: from the run's folder, or from the results of the job if it is not there.

        Raises: StoreError: the driver does not see it.
        """
        if name in unsaved:
            log.warning(
                "%s could not be written to %s and came with the results of the job: the model that fit returns is all "
                "there is of it, save it with model.save(path)",
                name,
                run.url,
            )
            return unsaved[name]
        try:
            return run.read_bytes(name)
        except OSError as error:
            raise StoreError(
                f"the workers wrote the trained model to {run.url}, where the driver does not see it ({error}); name a "
                "store, or a checkpoint_dir, that all of them share",
                url=run.url,
            ) from error

    def _batch_sizes(self) -> tuple[int | None, int | None]:
        """Of the global batch, or of each worker's."""
        whole, each = self.getOrDefault("batch_size"), self.getOrDefault("per_worker_batch_size")
        return (DEFAULT_BATCH_SIZE, None) if whole is None and each is None else (whole, each)


def _flat(names: Sequence[Any]) -> list[str]:
    return [each for name in names for each in (name if isinstance(name, list) else [name])]

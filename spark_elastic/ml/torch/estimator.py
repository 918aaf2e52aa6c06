"""ElasticTorchEstimator: a PyTorch module, trained elastically on the rows of a DataFrame."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from pyspark.ml.param import Param

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError, UsageError
from spark_elastic.exact.random_state import check_generators
from spark_elastic.jobs.driver_callbacks import DriverCallback
from spark_elastic.ml import params as to
from spark_elastic.ml.callbacks import Callback, check_kinds
from spark_elastic.ml.estimator import ElasticEstimator, FitTimings
from spark_elastic.ml.model import Fitted
from spark_elastic.ml.params import accessors, keyword_only, same_keywords, setting, with_keywords_of
from spark_elastic.ml.persistence import Codec
from spark_elastic.ml.run_folder import described
from spark_elastic.ml.shared_params import (
    BestMode,
    ColumnsFunction,
    Compression,
    Consistency,
    DType,
    HandleInvalid,
    OutputType,
    PredictionRule,
    Shapes,
)
from spark_elastic.ml.torch import lightning, objective, serialization, transformers
from spark_elastic.ml.torch.dry_run import dry_run, initialise, lazy_names
from spark_elastic.ml.torch.model import ElasticTorchModel
from spark_elastic.ml.torch.model_step import ModelStep
from spark_elastic.ml.torch.spec import MODEL_FILE, TorchTraining, check_parameters
from spark_elastic.ml.torch.training import train
from spark_elastic.ml.training.dry_run import DryRunResult
from spark_elastic.runs.trust import trusted_files
from spark_elastic.settings import meant_device


class ElasticTorchEstimator(ElasticEstimator[ElasticTorchModel]):
    """Trains a `torch.nn.Module` on a DataFrame, in workers that may join and leave; `fit` returns the trained model.

    ::

        estimator = ElasticTorchEstimator(
            model=net, optimizer=torch.optim.Adam(net.parameters(), lr=1e-3), loss=nn.CrossEntropyLoss(),
            feature_cols=["features"], label_cols=["label"], batch_size=1024, epochs=10, validation=0.1,
            min_num_proc=2, max_num_proc=8,
        )
        model = estimator.fit(df)

    All settings are keywords, and Params of Spark ML: `print(estimator.explainParams())` explains each. `fit` trains a
    copy of the module. It raises an `InvalidSettingsError`, `DataError`, `StoreError` or `CheckpointError` that says
    what to change before any worker starts; a `UserFunctionError` if your code raised in a worker; and a `JobError` if
    the job could not continue.

    Args:
        optimizer: An instance on the model's parameters, whose groups and options are kept; a class; or a function of
            the list of parameters.
        loss: A module or function of (output, label); a list with one for each label. A loss of your own returns the
            mean over the rows, a value for each row, or (numerator, denominator).
        metrics: Functions of (output, label) or torchmetrics metrics, by name.
        train_fn: Function (model, batch) -> loss or (loss, outputs), instead of loss, for models that are not trained
            as loss(model(inputs), label). The batch has `inputs`, `labels`, `weights`, and `batch["features_0"]`.
        callbacks: Callbacks of `spark_elastic.ml.callbacks`, such as `EarlyStopping`, which run in the workers, and
            `spark_elastic.DriverCallback`, which run on the driver.
    """

    DECIDING = (*ElasticEstimator.DECIDING, "train_fn", "lr_scheduler", "scheduler_interval", "scheduler_monitor")

    model: Param[torch.nn.Module | None]
    optimizer: Param[torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None]
    loss: Param[Callable[..., Any] | Sequence[Callable[..., Any]] | None]
    loss_weights: Param[Sequence[float] | None]
    metrics: Param[Mapping[str, Any] | None]
    callbacks: Param[Callback | DriverCallback | Sequence[Callback | DriverCallback] | None]
    train_fn: Param[Callable[..., Any] | None] = setting(
        "(model, batch) -> loss, or (loss, outputs) for metrics; instead of loss. batch has inputs, labels, weights. "
        "The loss: a mean over rows, a value for each row, or (numerator, denominator).",
        to.function,
    )
    getTrainFn, setTrainFn = accessors(train_fn)
    lr_scheduler: Param[torch.optim.lr_scheduler.LRScheduler | Callable[[torch.optim.Optimizer], Any] | None] = setting(
        "a scheduler on the optimizer, or a function of the optimizer that returns one.", to.anything
    )
    getLrScheduler, setLrScheduler = accessors(lr_scheduler)
    scheduler_interval: Param[Literal["epoch", "step"]] = setting(
        "step lr_scheduler after each 'epoch' or each 'step'.", to.one_of("epoch", "step"), default="epoch"
    )
    getSchedulerInterval, setSchedulerInterval = accessors(scheduler_interval)
    scheduler_monitor: Param[str | None] = setting(
        "column of the history that a scheduler such as ReduceLROnPlateau follows. Default: 'val_loss', or 'loss'.",
        to.text,
    )
    getSchedulerMonitor, setSchedulerMonitor = accessors(scheduler_monitor)
    virtual_workers: Param[int | None] = setting(
        "with consistency='exact': the shards that each batch is cut into, whatever the number of workers, each with "
        "its own random numbers and batch normalisation. Default: max_num_proc, or num_proc.",
        to.whole(at_least=1),
    )
    getVirtualWorkers, setVirtualWorkers = accessors(virtual_workers)
    generators: Param[Sequence[Any] | None] = setting(
        "with consistency='exact': random generators that the model, its loss, metrics or transformation_fn have in "
        "attributes, besides the global ones of torch, numpy and random.",
        to.anything,
    )
    getGenerators, setGenerators = accessors(generators)

    @keyword_only
    def __init__(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        train_fn: Callable[..., Any] | None = None,
        loss_weights: Sequence[float] | None = None,
        loss_is_per_worker: bool = False,
        feature_cols: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        label_cols: str | Sequence[str] | None = None,
        sample_weight_col: str | None = None,
        input_shapes: Shapes | None = None,
        input_dtypes: DType | Sequence[DType | None] | None = None,
        label_shapes: Shapes | None = None,
        batch_size: int | None = None,
        per_worker_batch_size: int | None = None,
        epochs: int = 1,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | Callable[[torch.optim.Optimizer], Any] | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        scheduler_monitor: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        consistency: Consistency = "trajectory",
        virtual_workers: int | None = None,
        generators: Sequence[Any] | None = None,
        validation: float | str | None = None,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Callback | DriverCallback | Sequence[Callback | DriverCallback] | None = None,
        num_proc: int | None = None,
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        device: str | None = None,
        num_threads: int | None = None,
        run_options: Mapping[str, Any] | None = None,
        verbose: int = 1,
        status_port: int | Literal["auto"] | None = "auto",
        store: str | os.PathLike[str] | Store | None = None,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        resume: bool = True,
        checkpoint_interval: int = 1,
        checkpoint_seconds: float | None = None,
        keep_checkpoints: int = 3,
        checkpoint_best_of: str | None = None,
        checkpoint_best_mode: BestMode = "auto",
        transformation_fn: ColumnsFunction | None = None,
        accumulation_steps: int = 1,
        gradient_clip_norm: float | None = None,
        gradient_clip_value: float | None = None,
        gradient_compression: Compression = "none",
        sync_batch_norm: bool = True,
        allow_nan_loss: bool = False,
        dataset_id: str | None = None,
        keep_dataset: bool = False,
        data_options: Mapping[str, Any] | None = None,
        output_cols: str | Sequence[str] | None = None,
        output_type: OutputType = "array",
        prediction_col: str = "prediction",
        prediction: PredictionRule = "auto",
        probability_col: str | None = None,
        raw_prediction_col: str | None = None,
        handle_invalid: HandleInvalid = "error",
        inference_fn: ColumnsFunction | None = None,
        transform_batch_size: int | None = None,
        transform_threads: int = 1,
        transform_device: str = "cpu",
    ) -> None:
        super().__init__(**self._input_kwargs)

    @classmethod
    @with_keywords_of(__init__)
    def from_lightning(cls, module: torch.nn.Module, settings: dict[str, Any]) -> ElasticTorchEstimator:
        """Return an estimator that trains a LightningModule by its own steps and `configure_optimizers`.

        Args:
            module: The module. Its steps get `(features, labels)`; several inputs or labels are a tuple.
            settings: The other settings, as keywords, without those that the module decides: loss, metrics, optimizer
                and lr_scheduler.

        Raises:
            InvalidSettingsError: The module overrides something that would change the result and is not called here,
                or a setting is the module's to decide.
        """
        _check_absent(settings)
        lightning.check_module(module)
        return cls(**{**settings, "model": module, "train_fn": lightning.LightningStep()})

    @classmethod
    @with_keywords_of(__init__)
    def from_transformers(cls, model: torch.nn.Module, settings: dict[str, Any]) -> ElasticTorchEstimator:
        """Return an estimator for a model that takes inputs by name and returns an object with `.loss` and `.logits`.

        Args:
            model: A model of transformers, or another one with such a forward.
            settings: The other settings, as keywords. `feature_cols` and `label_cols` name the arguments of the model's
                forward, such as "input_ids" and "labels". The default optimizer is AdamW with a rate of 5e-5.

        Raises:
            InvalidSettingsError: A setting does not go with a model that computes its own loss.
        """
        _check_absent(settings)
        return cls(**transformers.settings_of(model, settings))

    @same_keywords(__init__)
    def setParams(self) -> ElasticTorchEstimator:
        """Set several settings at once; takes the keywords of the constructor."""
        return self._set_given()

    @classmethod
    def _codec(cls) -> Codec:
        return serialization

    def _check_together(self) -> None:
        super()._check_together()
        for name in ("device", "transform_device"):
            given = self._given(name)
            if given is not None and (meant := meant_device(given)) not in (None, given):
                raise InvalidSettingsError(f"{name}={given!r} is no device of torch; did you mean {meant!r}?")
        if self._given("consistency") == "exact":
            self._check_exact()
        for name in ("virtual_workers", "generators"):
            if self._is_given(name) and self._given("consistency") != "exact":
                raise InvalidSettingsError(
                    f"{name}={self._given(name)} without consistency='exact', which uses them; set both"
                )
        if (step := self._model_step()) is not None:
            for name in step.decides:
                if self._is_given(name):
                    raise InvalidSettingsError(f"{name} is set, but {step.name} decides it itself; leave it out")
        if self._given("loss") is not None and self._given("train_fn") is not None:
            raise InvalidSettingsError(
                "loss and train_fn are both set; a train_fn computes its own loss, leave one out"
            )
        if self._given("loss_weights") is not None and self._given("train_fn") is not None:
            raise InvalidSettingsError("loss_weights are for losses; a train_fn weighs its losses itself")
        for name in ("scheduler_monitor", "scheduler_interval"):
            if self._is_given(name) and self._given("lr_scheduler") is None:
                raise InvalidSettingsError(f"{name} is set, but there is no lr_scheduler")

    def _check_exact(self) -> None:
        """Raise `InvalidSettingsError` for a setting with which results depend on the number of workers."""
        for name, neutral, advice in (
            ("per_worker_batch_size", None, "set batch_size, the rows of all workers together"),
            ("gradient_compression", "none", "leave gradients as they are"),
        ):
            if self._given(name) != neutral:
                raise InvalidSettingsError(
                    f"{name}={self._given(name)!r} makes the result depend on the number of workers, which "
                    f"consistency='exact' rules out; {advice}"
                )
        if self.isSet("sync_batch_norm") and self._given("sync_batch_norm"):
            raise InvalidSettingsError(
                "sync_batch_norm=True with consistency='exact', where batch normalisation takes the statistics of each "
                "virtual worker's rows; leave it out"
            )
        if not isinstance(generators := self._given("generators") or [], (list, tuple)):
            raise InvalidSettingsError(f"generators must be a list of random generators, not {generators!r}")
        try:
            check_generators(generators)
        except UsageError as error:
            raise InvalidSettingsError(str(error)) from None
        step = self._model_step()
        if step is not None and not step.exact:
            raise InvalidSettingsError(
                f"consistency='exact' cannot train {step.name}, which may keep values between its steps that depend on "
                "the rows of a worker; use consistency='trajectory', or loss or train_fn"
            )

    def _virtual_workers(self) -> int | None:
        """Return the shards of each batch, None unless the training is to be exact; raise if no setting says it."""
        if self._given("consistency") != "exact":
            return None
        found = next(filter(None, map(self._given, ("virtual_workers", "max_num_proc", "num_proc"))), None)
        if found is None:
            raise InvalidSettingsError(
                "consistency='exact' needs virtual_workers, the number of shards of each batch: the present slots of "
                "the cluster must not decide it. Set virtual_workers, or max_num_proc"
            )
        return int(found)

    def _check_framework(self) -> None:
        model, optimizer = self._given("model"), self._given("optimizer")
        if not isinstance(model, torch.nn.Module):
            raise InvalidSettingsError(
                f"model must be a torch.nn.Module, not {model!r}" if model is not None else "model is not set"
            )
        step = self._model_step()
        if optimizer is None and (step is None or not step.makes_optimizer):
            raise InvalidSettingsError(
                "optimizer is not set: torch.optim.Adam(model.parameters(), lr=1e-3), for example"
            )
        if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
            raise InvalidSettingsError(
                f"optimizer must be a torch optimizer, its class, or a function of the parameters, not {optimizer!r}"
            )
        self._check_losses()
        self._virtual_workers()
        if isinstance(optimizer, torch.optim.Optimizer):
            check_parameters(optimizer, model)
            if getattr(self._given("lr_scheduler"), "optimizer", optimizer) is not optimizer:
                raise InvalidSettingsError(
                    "lr_scheduler was made for another optimizer than the one that is set; give a function of the "
                    "optimizer that returns a scheduler"
                )
        check_kinds(self._worker_callbacks(), (Callback,), "spark_elastic.ml.callbacks.Callback")
        if self._given("device") not in (None, "auto"):
            try:
                torch.device(self._given("device"))
            except RuntimeError as error:
                raise InvalidSettingsError(f"device={self._given('device')!r}: {error}") from None

    def _check_losses(self) -> None:
        loss, labels = self._given("loss"), self._given("label_cols")
        if loss is None and self._given("train_fn") is None:
            raise InvalidSettingsError("neither loss nor train_fn is set; give one of them")
        for each in to.as_list(loss):
            if isinstance(each, type) or not callable(each):
                hint = f"; make one: {each.__name__}()" if isinstance(each, type) else ""
                raise InvalidSettingsError(
                    f"loss must be a module or a function of (output, label), not {each!r}{hint}"
                )
        if isinstance(loss, (list, tuple)) and labels and len(loss) != len(labels):
            raise InvalidSettingsError(f"{len(loss)} losses for {len(labels)} label_cols ({', '.join(labels)})")

    def _label_dtypes(self) -> list[str | None]:
        loss, labels = self._given("loss"), self._given("label_cols") or []
        if (step := self._model_step()) is not None:
            return [step.label_dtype] * len(labels)
        each = list(loss) if isinstance(loss, (list, tuple)) else [loss] * len(labels)
        return [objective.label_dtype(one) for one in each]

    def _model_step(self) -> ModelStep | None:
        """Return the `train_fn` of a model that decides how it is trained; None for other models."""
        train_fn = self._given("train_fn")
        return train_fn if isinstance(train_fn, ModelStep) else None

    def _configured(self, dataset: Dataset) -> dict[str, Any]:
        """Return the settings that the model decides now that the rows are known."""
        step, batch_size = self._model_step(), self._batch_size()
        if step is None:
            return {}
        steps = None if batch_size is None else -(-dataset.rows("train") // batch_size)
        return step.configured(self._given("model"), self._given("epochs"), steps)

    def _identity(self, dataset: Dataset) -> dict[str, Any]:
        configured = {name: each for name, each in self._configured(dataset).items() if name in self.DECIDING}
        configured.pop("train_fn", None)
        virtual = self._virtual_workers()
        return {
            **super()._identity(dataset),
            **({} if virtual is None else {"virtual_workers": virtual}),
            **{name: described(each) for name, each in configured.items()},
        }

    def _fit_rows(self, rows: Dataset, context: Any, timings: FitTimings) -> ElasticTorchModel:
        if lazy_names(self._given("model")):  # before anything describes the model or makes a copy of it
            initialise(self._training(rows, rows.store, None))
        return super()._fit_rows(rows, context, timings)

    def _training(self, dataset: Dataset, run: Store, resume_from: str | None) -> TorchTraining:
        same = ("model", "optimizer", "loss", "loss_weights", "train_fn", "lr_scheduler", "scheduler_interval")
        settings = {
            **self._common_settings(dataset, run, resume_from),
            "metrics": self._given("metrics") or {},
            "virtual_workers": self._virtual_workers(),
            "generators": self._given("generators") or (),
            "scheduler_monitor": self._given("scheduler_monitor"),
            "callbacks": self._worker_callbacks(),
            **{name: self._given(name) for name in same},
        }
        return TorchTraining(**{**settings, **self._configured(dataset)})

    def _dry_run(self, training: TorchTraining) -> DryRunResult:
        return dry_run(training, self._given("inference_fn"))

    def _train_fn(self) -> Callable[[Any], Any]:
        return train

    def _model_nbytes(self, training: TorchTraining) -> int:
        weights = training.model.state_dict().values()
        return sum(each.nbytes for each in weights if isinstance(each, torch.Tensor))

    def _fitted_model(self, training: TorchTraining, fitted: Fitted, read: Callable[[str], bytes]) -> ElasticTorchModel:
        model = ElasticTorchModel()
        with trusted_files():  # written by the workers of this fit
            module = serialization.trained_copy(training.model, read(MODEL_FILE))
        model._attach(module, fitted)
        return model


def _check_absent(settings: Mapping[str, Any]) -> None:
    """Raise InvalidSettingsError if a setting is given that follows from the first argument of `from_...`."""
    for name in ("model", "train_fn"):
        if settings.get(name) is not None:
            raise InvalidSettingsError(f"{name} follows from the model that is the first argument; leave it out")

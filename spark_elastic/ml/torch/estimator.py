"""ElasticTorchEstimator: a PyTorch module, trained elastically on the rows of a DataFrame."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError, UsageError
from spark_elastic.exact.random_state import check_generators
from spark_elastic.jobs.driver_callbacks import DriverCallback
from spark_elastic.ml import params as to
from spark_elastic.ml import shared_params as shared
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.estimator import ElasticEstimator
from spark_elastic.ml.params import keyword_only, same_keywords, setting, with_keywords_of
from spark_elastic.ml.saved_stage import Codec
from spark_elastic.ml.torch import lightning, serialization, transformers
from spark_elastic.ml.torch.fit import TorchFit
from spark_elastic.ml.torch.model import ElasticTorchModel, HalfPrecision
from spark_elastic.ml.torch.model_step import model_step_of
from spark_elastic.settings import accepting, meant_device


def _is_compiler(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value != "")


class ElasticTorchEstimator(HalfPrecision, ElasticEstimator[ElasticTorchModel]):
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
        model: A module; or a function, or class, that returns one, called with the shapes of the inputs (the rows are
            -1), or without arguments. Workers call it too, so such a module need not be picklable.
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

    train_fn, getTrainFn, setTrainFn = setting(
        "(model, batch) -> loss, or (loss, outputs) for metrics; instead of loss. batch has inputs, labels, weights. "
        "The loss: a mean over rows, a value for each row, or (numerator, denominator).",
        to.function,
    )
    lr_scheduler, getLrScheduler, setLrScheduler = setting(
        "a scheduler on the optimizer, or a function of the optimizer that returns one.", to.anything
    )
    scheduler_interval, getSchedulerInterval, setSchedulerInterval = setting(
        "step lr_scheduler after each 'epoch' or each 'step'.", to.one_of("epoch", "step"), default="epoch"
    )
    scheduler_monitor, getSchedulerMonitor, setSchedulerMonitor = setting(
        "column of the history that a scheduler such as ReduceLROnPlateau follows. Default: 'val_loss', or 'loss'.",
        to.text,
    )
    amp, getAmp, setAmp = setting(
        "mixed precision by torch.autocast: 'bf16', or 'fp16' with a GradScaler. Default: none.",
        to.one_of("bf16", "fp16"),
    )
    compile, getCompile, setCompile = setting(
        "compile the model by torch.compile in each worker: True, or the name of a backend.",
        accepting("True, False or the name of a backend of torch.compile", _is_compiler, lambda value: value),
        default=False,
    )
    virtual_workers, getVirtualWorkers, setVirtualWorkers = setting(
        "with consistency='exact': the shards that each batch is cut into, whatever the number of workers, each with "
        "its own random numbers and batch normalisation. Default: max_num_proc, or num_proc.",
        to.whole(at_least=1),
    )
    generators, getGenerators, setGenerators = setting(
        "with consistency='exact': random generators that the model, its loss, metrics or transformation_fn have in "
        "attributes, besides the global ones of torch, numpy and random.",
        to.anything,
    )

    @keyword_only
    def __init__(
        self,
        *,
        model: torch.nn.Module | Callable[..., torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
        train_fn: Callable[..., Any] | None = None,
        loss_weights: Sequence[float] | None = None,
        loss_is_per_worker: bool = False,
        feature_cols: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        label_cols: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        sample_weight_col: str | None = None,
        input_shapes: shared.Shapes | None = None,
        input_dtypes: shared.DType | Sequence[shared.DType | None] | None = None,
        label_shapes: shared.Shapes | None = None,
        missing: shared.Missing = "error",
        batch_size: int | None = None,
        per_worker_batch_size: int | None = None,
        epochs: int = 1,
        on_interrupt: shared.OnInterrupt = "raise",
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | Callable[[torch.optim.Optimizer], Any] | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        scheduler_monitor: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        amp: Literal["bf16", "fp16"] | None = None,
        compile: bool | str = False,
        consistency: shared.Consistency = "trajectory",
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
        checkpoint_best_mode: shared.BestMode = "auto",
        transformation_fn: shared.ColumnsFunction | None = None,
        accumulation_steps: int = 1,
        balance: shared.Balance = "equal",
        gradient_clip_norm: float | None = None,
        gradient_clip_value: float | None = None,
        gradient_compression: shared.Compression = "none",
        sync_batch_norm: bool = True,
        allow_nan_loss: bool = False,
        dataset_id: str | None = None,
        keep_dataset: bool = False,
        data_options: Mapping[str, Any] | None = None,
        output_cols: str | Sequence[str] | None = None,
        output_type: shared.OutputType = "array",
        prediction_col: str | None = "prediction",
        prediction: shared.PredictionRule = "auto",
        probability_col: str | None = "probability",
        raw_prediction_col: str | None = "rawPrediction",
        handle_invalid: shared.HandleInvalid = "error",
        inference_fn: shared.ColumnsFunction | None = None,
        transform_batch_size: int | None = None,
        transform_threads: int = 1,
        transform_device: str = "auto",
        transform_amp: Literal["bf16", "fp16"] | None = None,
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
    def from_transformers(
        cls, model: torch.nn.Module | Callable[[], torch.nn.Module], settings: dict[str, Any]
    ) -> ElasticTorchEstimator:
        """Return an estimator for a model that takes inputs by name and returns an object with `.loss` and `.logits`.

        Args:
            model: A model of transformers or PEFT, or another one with such a forward; or a function that returns one,
                called here and in each worker.
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
        if (step := model_step_of(self._given("train_fn"))) is not None:
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
        for name, neutral, advice in (
            ("per_worker_batch_size", None, "set batch_size, the rows of all workers together"),
            ("gradient_compression", "none", "leave gradients as they are"),
            ("amp", None, "train in full precision"),
            ("compile", False, "leave it out"),
        ):
            if self._given(name) != neutral:
                raise InvalidSettingsError(
                    f"{name}={self._given(name)!r} may make the result depend on the number of workers, which "
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
        step = model_step_of(self._given("train_fn"))
        if step is not None and not step.exact:
            raise InvalidSettingsError(
                f"consistency='exact' cannot train {step.name}, which may keep values between its steps that depend on "
                "the rows of a worker; use consistency='trajectory', or loss or train_fn"
            )

    def _fit_run(self) -> TorchFit:
        return TorchFit(self, self._shared_datasets)


def _check_absent(settings: Mapping[str, Any]) -> None:
    """Raise InvalidSettingsError if a setting is given that follows from the first argument of `from_...`."""
    for name in ("model", "train_fn"):
        if settings.get(name) is not None:
            raise InvalidSettingsError(f"{name} follows from the model that is the first argument; leave it out")

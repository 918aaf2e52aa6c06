"""ElasticKerasEstimator: a Keras model, trained elastically on the rows of a DataFrame.

Keras is imported inside of functions, so that the class can be imported without Keras, and its constructor can say what
to install.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pyspark.ml.param import Param

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, InvalidSettingsError, NotPicklableError
from spark_elastic.jobs.driver_callbacks import DriverCallback
from spark_elastic.ml import params as to
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.datasets import model_inputs
from spark_elastic.ml.estimator import ElasticEstimator
from spark_elastic.ml.keras.model import ElasticKerasModel
from spark_elastic.ml.keras.pickling import KerasPickle, dumps
from spark_elastic.ml.keras.training import ENV, NEEDED, KerasTraining, check_backend, device_name, global_config, train
from spark_elastic.ml.model import Fitted
from spark_elastic.ml.params import accessors, keyword_only, same_keywords, setting
from spark_elastic.ml.persistence import Codec
from spark_elastic.ml.preparation import FLOAT, INPUT, Tensors, is_list
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
from spark_elastic.ml.training.dry_run import DryRunResult

if TYPE_CHECKING:
    import keras

    from spark_elastic.ml.keras.compiling import CompileArguments

    KerasLoss: TypeAlias = str | keras.Loss | Callable[..., Any]
    KerasCallback: TypeAlias = Callback | DriverCallback | keras.callbacks.Callback

COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
"""Settings that default to those that the model was compiled with."""


class ElasticKerasEstimator(ElasticEstimator[ElasticKerasModel]):
    """Trains a `keras.Model` on a DataFrame, in workers that may join and leave; `fit` returns the trained model.

    ::

        estimator = ElasticKerasEstimator(
            model=model, optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy",
            metrics=["accuracy"], feature_cols=["features"], label_cols=["label"], batch_size=1024, epochs=10,
            validation=0.1, min_num_proc=2, max_num_proc=8,
        )
        model = estimator.fit(df)

    All settings are keywords, and Params of Spark ML: `print(estimator.explainParams())` explains each. `fit` trains a
    copy of the model. If the model is compiled, its optimizer, losses and metrics are the defaults. Keras has to run on
    TensorFlow. `fit` raises an `InvalidSettingsError`, `DataError`, `StoreError` or `CheckpointError` that says what to
    change before any worker starts; a `UserFunctionError` if your code raised in a worker; and a `JobError` if the job
    could not continue.

    Args:
        optimizer: As in `keras.Model.compile`; so are `loss`, `loss_weights`, `metrics` and `weighted_metrics`, with
            names, lists, and dicts by output.
        feature_cols: Columns of the inputs. A column with the name of an input goes to it, the others in the order of
            `model.inputs`; inputs of one shape in a dict need columns of their names.
        label_cols: One for each output that has a loss, in the order of `model.outputs`; for outputs in a dict, in the
            order of their names, with these names if outputs have one shape.
        callbacks: Callbacks of `spark_elastic.ml.callbacks` and of `keras.callbacks`, which run in the workers, and
            `spark_elastic.DriverCallback`, which run on the driver, in any order.
        custom_objects: Classes and functions by the names that Keras knows them by, as in `keras.saving.load_model`.
            Those that the model itself consists of need not be listed.

    Raises:
        MissingExtraError: TensorFlow is not installed.
    """

    TOGETHER: tuple[str, ...] = ()
    DECIDING = (*ElasticEstimator.DECIDING, "custom_objects")

    model: Param[keras.Model | None]
    optimizer: Param[keras.Optimizer | str | Mapping[str, Any] | None] = setting(
        "a keras optimizer, its name, or its configuration. Default: that of the compiled model.", to.anything
    )
    loss: Param[KerasLoss | Sequence[KerasLoss | None] | Mapping[str, KerasLoss | None] | None] = setting(
        "as of compile: a name, a keras loss, a function of (label, output); a list, or a dict by output, of several. "
        "Default: that of the compiled model.",
        to.anything,
    )
    loss_weights: Param[Sequence[float] | Mapping[str, float] | None] = setting(
        "as of compile: a factor for each loss, in a list or a dict by output. Default: 1 each.", to.anything
    )
    metrics: Param[Sequence[Any] | Mapping[str, Any] | None] = setting(
        "as of compile: names, keras metrics and functions in a list; lists or a dict by output for several. Default: "
        "those of the compiled model.",
        to.anything,
    )
    weighted_metrics: Param[Sequence[Any] | Mapping[str, Any] | None] = setting(
        "as of compile: metrics in which rows count by sample_weight_col.", to.anything
    )
    getWeightedMetrics, setWeightedMetrics = accessors(weighted_metrics)
    callbacks: Param[KerasCallback | Sequence[KerasCallback] | None] = setting(
        "list of spark_elastic.ml.callbacks.Callback and keras.callbacks.Callback (in the workers) and "
        "spark_elastic.DriverCallback (on the driver).",
        to.anything,
    )
    custom_objects: Param[Mapping[str, Any] | None] = setting(
        "dict of the names and the classes or functions of your own in the model's configuration, unless they are "
        "registered with Keras or the model consists of them.",
        to.dictionary,
    )
    getCustomObjects, setCustomObjects = accessors(custom_objects)

    @keyword_only
    def __init__(
        self,
        *,
        model: keras.Model | None = None,
        optimizer: keras.Optimizer | str | Mapping[str, Any] | None = None,
        loss: KerasLoss | Sequence[KerasLoss | None] | Mapping[str, KerasLoss | None] | None = None,
        loss_weights: Sequence[float] | Mapping[str, float] | None = None,
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
        shuffle: bool = True,
        seed: int = 0,
        consistency: Consistency = "trajectory",
        validation: float | str | None = None,
        metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        weighted_metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        callbacks: KerasCallback | Sequence[KerasCallback] | None = None,
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
        custom_objects: Mapping[str, Any] | None = None,
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
        check_backend(type(self).__name__)
        super().__init__(**self._input_kwargs)

    @same_keywords(__init__)
    def setParams(self) -> ElasticKerasEstimator:
        """Set several settings at once; takes the keywords of the constructor."""
        return self._set_given()

    @classmethod
    def _codec(cls) -> Codec:
        return ElasticKerasModel._codec()

    def _check_together(self) -> None:
        if self._given("consistency") == "exact":
            raise InvalidSettingsError(
                "consistency='exact' is for PyTorch alone; leave it out: results of ElasticKerasEstimator agree up to "
                "rounding and random numbers for any number of workers"
            )
        super()._check_together()

    def _check_loss_weights(self) -> None:
        losses, weights = self._given("loss"), self._given("loss_weights")
        if weights is None:
            return
        if isinstance(losses, (list, tuple)) and isinstance(weights, (list, tuple)) and len(losses) != len(weights):
            raise InvalidSettingsError(f"{len(weights)} loss_weights for {len(losses)} losses; give one for each")
        if isinstance(weights, Mapping) and isinstance(losses, Mapping):
            for name in weights:
                if name not in losses:
                    raise InvalidSettingsError(f"loss_weights has {name!r}, and loss has {', '.join(losses)}")

    def _check_framework(self) -> None:
        import keras

        from spark_elastic.ml.keras.callbacks import check_callbacks
        from spark_elastic.ml.keras.compiling import check_losses, compiled_with

        model = self._given("model")
        if not isinstance(model, keras.Model):
            raise InvalidSettingsError(_no_model(model))
        compiled = self._compile_arguments()
        if compiled.loss is None and not compiled_with(model):
            raise InvalidSettingsError("loss is not set, and the model is not compiled; set it, or compile the model")
        check_losses(model, compiled.loss, self._given("label_cols"))
        for each in getattr(model, "inputs", None) or ():
            if each.shape[0] is not None:
                raise InvalidSettingsError(
                    f"the model's input {each.name} takes batches of {each.shape[0]} rows only, but workers take "
                    "shares of a batch that have any size; create it with shape= instead of batch_shape="
                )
        check_callbacks(self._worker_callbacks())
        for name in ("device", "transform_device"):
            if self._given(name) not in (None, "auto"):
                device_name(self._given(name))

    def _given(self, name: str) -> Any:
        """Return the value of a setting, or its default; those of the inputs in the order of the model's inputs."""
        value = super()._given(name)
        if name not in ("feature_cols", "input_shapes", "input_dtypes") or not isinstance(value, list):
            return value
        if any(super(ElasticKerasEstimator, self)._given(each) for each in ("transformation_fn", "inference_fn")):
            return value  # which are given the tensors in the order of feature_cols
        from spark_elastic.ml.keras.compiling import order_by_name

        order = order_by_name(super()._given("model"), super()._given("feature_cols") or [])
        return value if order is None or len(order) != len(value) else [value[at] for at in order]

    def _compile_arguments(self) -> CompileArguments:
        from spark_elastic.ml.keras.compiling import compile_arguments

        return compile_arguments(self._given("model"), **{name: self._given(name) for name in COMPILED})

    def _takes_float32(self, tensor: str) -> bool:
        inputs = getattr(self._given("model"), "inputs", None) or []
        at = int(tensor.removeprefix(INPUT)) if tensor.startswith(INPUT) else len(inputs)
        return at < len(inputs) and str(inputs[at].dtype) == "float32"

    def _losses(self) -> list[Any]:
        """Return the loss of each label; [] if the model adds its own."""
        from spark_elastic.ml.keras.compiling import check_losses

        labels = self._given("label_cols") or []
        pairs = check_losses(self._given("model"), self._compile_arguments().loss, labels)
        return [loss for _, loss in pairs] * (len(labels) if len(pairs) == 1 else 1)

    def _label_dtypes(self) -> list[str | None]:
        from spark_elastic.ml.keras.compiling import label_dtype

        return [label_dtype(loss) for loss in self._losses()]

    def _tensors(self, schema: Any) -> Tensors:
        from spark_elastic.ml.keras import compiling

        made = super()._tensors(schema)
        if self._given("transformation_fn") is not None:
            return made
        if self._given("input_dtypes") is None:
            # Keras casts inputs to the type of the Input. Storing them as that type refuses integers it would round.
            made |= Tensors({}, {name: FLOAT for name in made.dtypes if self._takes_float32(name)})
        for name, loss in zip(self._given("label_cols"), self._losses(), strict=False):
            kind = compiling.loss_kind(loss)
            if kind is not None and kind.labels == "one-hot" and not is_list(schema[name].dataType):
                raise DataError(
                    f"label_cols {name!r} is one number a row, but {compiling.name_of(loss)} needs a value for each "
                    "class: use sparse_categorical_crossentropy for class numbers, or make a vector of them "
                    "(OneHotEncoder with dropLast=False)"
                )
        return made

    def _training(self, dataset: Dataset, run: Store, resume_from: str | None) -> KerasTraining:
        from spark_elastic.ml.keras.compiling import values_of

        model, compiled = self._built_model(dataset), self._compile_arguments()
        if not compiled.optimizer.built and (steps := int(compiled.optimizer.iterations.numpy())):
            raise InvalidSettingsError(
                f"the optimizer counts {steps} iterations and has no values for the weights, so workers would begin "
                "at 0; call its build(model.trainable_variables) before, or give a schedule that begins there"
            )
        return KerasTraining(
            **self._common_settings(dataset, run, resume_from),
            model=self._sealed("model", model),
            compiled=self._sealed("the compile settings", compiled),
            optimizer_values=values_of(compiled.optimizer),
            callbacks=self._sealed("callbacks", self._worker_callbacks()),
            config=global_config(),
        )

    def _built_model(self, dataset: Dataset) -> Any:
        """Return the given model if it is built, else a copy that is built for the columns."""
        from spark_elastic.ml.keras.compiling import build_for, check_named, check_order, input_names

        model, inputs = self._given("model"), model_inputs(dataset, self._given("input_shapes"))
        names = input_names(model)
        if names is not None and len(names) != len(inputs) and self._given("transformation_fn") is None:
            found = ", ".join("+".join(field.columns) for field in inputs)
            raise InvalidSettingsError(
                f"the model has {len(names)} inputs ({', '.join(names)}), and feature_cols make {len(inputs)} "
                f"({found}); a list of lists makes an input of each inner list"
            )
        if self._given("transformation_fn") is None:
            columns = [field.columns for field in inputs]
            check_order("feature_cols", "inputs", names, columns)
            check_named("feature_cols", "inputs", getattr(model, "_inputs_struct", None), columns)
        # build() of a subclass without a build of its own only says that it is built
        if model.built and (model.variables or all(each.built for each in model._flatten_layers())):
            return model
        if self._given("transformation_fn") is not None:
            raise InvalidSettingsError(
                "the model is not built, and its inputs are not known because transformation_fn makes them: build it "
                "first, with keras.Input in it, or by calling it on an array"
            )
        return build_for(model, inputs, self._given("seed"), self._given("custom_objects"))

    def _pickled(self, value: Any) -> bytes:
        return dumps(value, self._given("custom_objects"))

    def _sealed(self, name: str, value: Any) -> KerasPickle:
        """Return a pickle of a setting. Raise `InvalidSettingsError` if workers would get another model from it."""
        from spark_elastic.ml.keras.fidelity import differences, different_values

        try:
            sealed = KerasPickle.of(value, self._given("custom_objects"))
            loaded = sealed.load() if name == "model" else None
            lost = [] if loaded is None else differences(value, loaded) or different_values(value, loaded)
        except Exception as error:
            raise NotPicklableError(
                f"{name} cannot be sent to the workers: {_first_words(error)}. Layers, models, metrics and schedules "
                "of your own need a get_config that returns all arguments of __init__, and an __init__ that passes "
                "**kwargs on to Keras. Register classes and functions of your own with "
                "@keras.saving.register_keras_serializable(), or give them in custom_objects={...}, so that the "
                "workers find them by name"
            ) from error
        if lost:
            raise InvalidSettingsError(
                f"the model that the workers get differs from the given one: {'; '.join(lost[:3])}. What was set after "
                "a layer was made must be in its get_config, or be made in its __init__ or build"
            )
        return sealed

    def _dry_run(self, training: KerasTraining) -> DryRunResult:
        from spark_elastic.ml.keras.dry_run import dry_run

        return dry_run(training, self._given("inference_fn"))

    def _train_fn(self) -> Callable[[Any], Any]:
        return train

    def _worker_env(self) -> dict[str, str]:
        return {ENV: NEEDED}

    def _model_nbytes(self, training: KerasTraining) -> int:
        return len(training.model)  # with its weights

    def _fitted_model(self, training: KerasTraining, fitted: Fitted, read: Callable[[str], bytes]) -> ElasticKerasModel:
        from spark_elastic.ml.keras.engine import MODEL_FILE
        from spark_elastic.ml.keras.serialization import fill

        model = ElasticKerasModel()
        keras_model = fill(training.model.load(), read(MODEL_FILE))
        model._attach(keras_model, fitted, self._given("custom_objects"))
        return model

    def _identity(self, dataset: Dataset) -> dict[str, Any]:
        compiled = self._compile_arguments()
        effective = {name: getattr(compiled, name) for name in ("optimizer", "loss", "loss_weights")}
        return {
            **super()._identity(dataset),
            **{name: self._described_value(value) for name, value in effective.items() if value is not None},
        }

    def _described(self, name: str) -> str:
        return self._described_value(self.getOrDefault(name))

    def _described_value(self, value: Any) -> str:
        from spark_elastic.ml.keras.serialization import comparable_config

        return described(comparable_config(value))


def _no_model(given: Any) -> str:
    if given is None:
        return "model is not set"
    kind = type(given)
    if isinstance(given, type):
        return f"model must be a keras.Model, not a class; make one: {given.__name__}(...)"
    if any(each.__module__.startswith("tf_keras") for each in kind.__mro__):
        return "model is of Keras 2 (tf_keras), and this trains those of Keras 3: import keras instead"
    hint = f"; keras.saving.load_model({given!r}) loads one" if str(given).endswith(".keras") else ""
    return f"model must be a keras.Model, not {given!r:.200} ({kind.__module__}.{kind.__name__}){hint}"


def _first_words(error: Exception) -> str:
    """Return the message of an error of Keras without the configurations that follow it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    message = next((line for line in lines if line.startswith("Exception encountered: ")), lines[0] if lines else "")
    return f"{type(error).__name__}: {message.removeprefix('Exception encountered: ').rstrip('.')[:400]}"

"""ElasticKerasEstimator: a Keras model, trained elastically on the rows of a DataFrame.

Keras is imported where it is used: without it the class can be named, and says what is missing when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, InvalidSettingsError, NotPicklableError
from spark_elastic.ml import params as to
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.datasets import model_inputs
from spark_elastic.ml.estimator import ElasticEstimator, TrialRun
from spark_elastic.ml.fingerprint import described
from spark_elastic.ml.keras.model import ElasticKerasModel
from spark_elastic.ml.keras.runtime import ENV, NEEDED, check_backend
from spark_elastic.ml.model import Fitted
from spark_elastic.ml.params import setting
from spark_elastic.ml.persistence import Codec
from spark_elastic.ml.preparation import FLOAT, Tensors, is_list
from spark_elastic.ml.training.columns import INPUT

if TYPE_CHECKING:
    from spark_elastic.ml.keras.compiling import CompileArguments
    from spark_elastic.ml.keras.pickling import KerasPickle
    from spark_elastic.ml.keras.training import KerasTraining

COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
"""Settings that are as the model was compiled where they are not set."""


class ElasticKerasEstimator(ElasticEstimator):
    """Trains a `keras.Model` on a DataFrame, in workers that may come and go, and returns an `ElasticKerasModel`.

    ::

        estimator = ElasticKerasEstimator(
            model=model, optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy",
            metrics=["accuracy"], feature_cols=["features"], label_cols=["label"], batch_size=1024, epochs=10,
            validation=0.1, min_num_proc=2, max_num_proc=8,
        )
        model = estimator.fit(df)

    All settings are keywords, and Params of Spark ML: `print(estimator.explainParams())` lists them. The model that is
    given is not changed by `fit`. It may be compiled; what is not set here is then as it was compiled. Keras has to run
    on TensorFlow.

    optimizer, loss, loss_weights, metrics, weighted_metrics: as of `keras.Model.compile`, with the names of losses and
        optimizers, lists, and dicts by the names of outputs.
    feature_cols: of the inputs in the order of `model.inputs`; of inputs in a dict, in the order of their names.
    label_cols: one for each output that has a loss, in the order of `model.outputs`.
    callbacks: of `spark_elastic.ml.callbacks` and of `keras.callbacks`, in any order.
    custom_objects: classes and functions by the names that Keras knows them by, as of `keras.saving.load_model`. Those
        that the model consists of are found without.

    Raises:
        MissingExtraError: TensorFlow is not installed.
    Raises (fit):
        InvalidSettingsError, DataError, StoreError, CheckpointError: what has to be changed; no worker was started.
        UserFunctionError: your code raised in a worker. JobError: the job could not go on.
    """

    TOGETHER: tuple[str, ...] = ()
    DECIDING = (*ElasticEstimator.DECIDING, "custom_objects")

    optimizer: Any = setting(
        "optimizer",
        "a keras optimizer, its name, or its configuration. Default: that of the compiled model.",
        to.anything,
    )
    loss: Any = setting(
        "loss",
        "as of compile: a name, a keras loss, a function of (label, output); a list, or a dict by output, of several. "
        "Default: that of the compiled model.",
        to.anything,
    )
    loss_weights: Any = setting(
        "loss_weights",
        "as of compile: a factor for each loss, in a list or a dict by output. Default: 1 each.",
        to.anything,
    )
    metrics: Any = setting(
        "metrics",
        "as of compile: names, keras metrics and functions in a list; lists or a dict by output for several. Default: "
        "those of the compiled model.",
        to.anything,
    )
    weighted_metrics: Any = setting(
        "weighted_metrics", "as of compile: metrics in which rows count by sample_weight_col.", to.anything
    )
    callbacks: Any = setting(
        "callbacks", "list of spark_elastic.ml.callbacks.Callback and keras.callbacks.Callback.", to.anything
    )
    custom_objects: Any = setting(
        "custom_objects",
        "dict of the names and the classes or functions of your own that the model's configuration names. Those that "
        "are registered with Keras, or that the model consists of, are found without.",
        to.dictionary,
    )

    def __init__(self, **settings: Any) -> None:
        check_backend(type(self).__name__)
        super().__init__(**settings)

    @classmethod
    def _codec(cls) -> Codec:
        check_backend(cls.__name__)
        from spark_elastic.ml.keras import safe_objects

        return safe_objects

    # Checks.

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

        from spark_elastic.ml.keras import runtime
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
                    f"the model's input {each.name} is of batches of {each.shape[0]} rows alone, and workers take "
                    "shares of a batch that may be of any size; make it with shape= instead of batch_shape="
                )
        for callback in self._callbacks():
            if not isinstance(callback, (Callback, keras.callbacks.Callback)):
                raise InvalidSettingsError(
                    "callbacks must be a list of spark_elastic.ml.callbacks.Callback and keras.callbacks.Callback; "
                    f"{callback!r} is none"
                )
        for name in ("device", "transform_device"):
            if self._given(name) not in (None, "auto"):
                runtime.device_name(self._given(name))

    def _compile_arguments(self) -> CompileArguments:
        from spark_elastic.ml.keras.compiling import compile_arguments

        return compile_arguments(self._given("model"), **{name: self._given(name) for name in COMPILED})

    def _takes_float32(self, tensor: str) -> bool:
        inputs = getattr(self._given("model"), "inputs", None) or []
        at = int(tensor.removeprefix(INPUT)) if tensor.startswith(INPUT) else len(inputs)
        return at < len(inputs) and str(inputs[at].dtype) == "float32"

    def _losses(self) -> list[Any]:
        """That of each label; [] if the model adds its own."""
        from spark_elastic.ml.keras.compiling import check_losses

        labels = self._given("label_cols") or []
        pairs = check_losses(self._given("model"), self._compile_arguments().loss, labels)
        return [loss for _, loss in pairs] * (len(labels) if len(pairs) == 1 else 1)

    def _label_dtypes(self) -> list[str | None]:
        from spark_elastic.ml.keras import compiling

        return [compiling.label_dtype(loss) for loss in self._losses()]

    def _tensors(self, schema: Any) -> Tensors:
        from spark_elastic.ml.keras import compiling

        made = super()._tensors(schema)
        if self._given("transformation_fn") is not None:
            return made
        if self._given("input_dtypes") is None:
            # Keras casts what it is given to the type of the Input, so that is where integers must not be rounded.
            made |= Tensors({}, {name: FLOAT for name in made.dtypes if self._takes_float32(name)})
        for name, loss in zip(self._given("label_cols"), self._losses(), strict=False):
            kind = compiling.loss_kind(loss)
            if kind is not None and kind.labels == "one-hot" and not is_list(schema[name].dataType):
                raise DataError(
                    f"label_cols {name!r} is one number a row, and {compiling.name_of(loss)} compares with a value for "
                    "each class: take sparse_categorical_crossentropy for the numbers of classes, or make a vector of "
                    "them (OneHotEncoder with dropLast=False)"
                )
        return made

    # The training.

    def _training(self, dataset: Dataset, run: Store, resume_from: str | None) -> KerasTraining:
        from spark_elastic.ml.keras.compiling import values_of
        from spark_elastic.ml.keras.training import KerasTraining

        model, compiled = self._built_model(dataset), self._compile_arguments()
        own = getattr(self._given("model"), "optimizer", None)
        return KerasTraining(
            **self._common_settings(dataset, run, resume_from),
            model=self._sealed("model", model),
            compiled=self._sealed("what the model is compiled with", compiled),
            optimizer_values=values_of(own) if compiled.optimizer is own else None,
            callbacks=self._sealed("callbacks", self._callbacks()),
        )

    def _built_model(self, dataset: Dataset) -> Any:
        """The model that was given, or a copy that is built for the columns. Raises: InvalidSettingsError."""
        from spark_elastic.ml.keras.structure import build_for, input_names

        model, inputs = self._given("model"), model_inputs(dataset, self._given("input_shapes"))
        names = input_names(model)
        if names is not None and len(names) != len(inputs) and self._given("transformation_fn") is None:
            found = ", ".join("+".join(field.columns) for field in inputs)
            raise InvalidSettingsError(
                f"the model has {len(names)} inputs ({', '.join(names)}), and feature_cols make {len(inputs)} "
                f"({found}); a list of lists makes an input of each inner list"
            )
        if model.built:
            return model
        if self._given("transformation_fn") is not None:
            raise InvalidSettingsError(
                "the model is not built, and what it will be given is what transformation_fn makes: build it first, by "
                "keras.Input in it, or by calling it on an array"
            )
        return build_for(model, inputs, self._given("seed"), self._given("custom_objects"))

    def _sealed(self, name: str, value: Any) -> KerasPickle:
        """Raises: NotPicklableError: with the name."""
        from spark_elastic.ml.keras.pickling import KerasPickle

        try:
            sealed = KerasPickle.of(value, self._given("custom_objects"))
            sealed.load()
        except Exception as error:
            raise NotPicklableError(
                f"{name} cannot be sent to the workers: {_first_words(error)}. Layers, models, metrics and schedules "
                "of your own need a get_config that returns all arguments of their __init__, which takes **kwargs for "
                "those of Keras; @keras.saving.register_keras_serializable(), or custom_objects={...}, says what a "
                "name in it stands for"
            ) from error
        return sealed

    def _try(self, training: KerasTraining) -> TrialRun:
        from spark_elastic.ml.keras.dry_run import dry_run

        return dry_run(training, self._given("inference_fn"))

    def _train_fn(self) -> Callable[[Any], Any]:
        from spark_elastic.ml.keras.training import train

        return train

    def _worker_env(self) -> dict[str, str]:
        return {ENV: NEEDED}

    def _model_nbytes(self, training: KerasTraining) -> int:
        return len(training.model)  # its weights are in it

    def _fitted_model(
        self, training: KerasTraining, fitted: Fitted, trained: Callable[[str], bytes]
    ) -> ElasticKerasModel:
        from spark_elastic.ml.keras.engine import MODEL_FILE
        from spark_elastic.ml.keras.serialization import fill

        model = ElasticKerasModel()
        keras_model = fill(training.model.load(), trained(MODEL_FILE))
        model._attach(keras_model, fitted, self._given("custom_objects"))
        return model

    # What is the same training.

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
    """Keras's errors go on with whole configurations."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines if line.startswith("Exception encountered: ")), lines[0] if lines else "")
    return f"{type(error).__name__}: {telling.removeprefix('Exception encountered: ').rstrip('.')[:400]}"

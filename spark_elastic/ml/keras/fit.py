"""KerasFit: the steps of a fit that are Keras's. Importing it imports TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import keras
import numpy as np

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, InvalidSettingsError, NotPicklableError
from spark_elastic.ml.fingerprint import described
from spark_elastic.ml.fit import FitRun
from spark_elastic.ml.fitted import Fitted
from spark_elastic.ml.keras import compiling
from spark_elastic.ml.keras.callbacks import check_callbacks
from spark_elastic.ml.keras.dry_run import dry_run
from spark_elastic.ml.keras.fidelity import differences, different_values
from spark_elastic.ml.keras.model import ElasticKerasModel
from spark_elastic.ml.keras.model_function import KerasFunction
from spark_elastic.ml.keras.pickling import KerasPickle, dumps
from spark_elastic.ml.keras.serialization import comparable_config, fill
from spark_elastic.ml.keras.spec import MODEL_FILE, KerasTraining
from spark_elastic.ml.keras.tensorflow_setup import ENV, NEEDED, device_name, global_config
from spark_elastic.ml.keras.train import train
from spark_elastic.ml.model_function import FORM, is_function, name_of, takes_shapes
from spark_elastic.ml.preparation import (
    FLOAT,
    INPUT,
    Columns,
    Tensors,
    is_list,
    model_inputs,
    numbered,
    ragged_column_error,
)
from spark_elastic.ml.training.dry_run import ROWS
from spark_elastic.ml.training.engine import first_rows
from spark_elastic.ml.training.spec import Training

COMPILED = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")  # defaults are those of the model


class KerasFit(FitRun[KerasTraining, ElasticKerasModel]):
    """One fit of a `keras.Model`, or of what a function makes."""

    deciding = (*FitRun.deciding, "custom_objects")
    worker_env: ClassVar = {ENV: NEEDED}
    train_fn = staticmethod(train)
    dry_run_fn = staticmethod(dry_run)

    _made: Any = None  # the model that the function has made, if `model` is a function
    _function: KerasFunction | None = None
    _order: Sequence[int] | None = None  # the number of the column for each input of that model

    @property
    def _model(self) -> Any:
        """The model; None as long as only a function is known that makes it."""
        given = super().given("model") if self._made is None else self._made
        return given if isinstance(given, keras.Model) else None

    def check_framework(self) -> None:
        given = super().given("model")
        if self._model is not None:
            self._check_model()
            compiling.check_takes_any_rows(self._model)
        elif not is_function(given):
            raise InvalidSettingsError(_no_model(given))
        else:
            takes_shapes(given)  # raises if it takes more
            if self.given("optimizer") is not None:
                compiling.optimizer_of(self.given("optimizer"))
            compiling.check_losses(None, self.given("loss"), self.given("label_cols"))
        check_callbacks(self.worker_callbacks())
        for name in ("device", "transform_device"):
            if self.given(name) not in (None, "auto"):
                device_name(self.given(name))

    def _check_model(self) -> None:
        model, compiled = self._model, self.compile_arguments()
        if compiled.loss is None and not compiling.compiled_with(model):
            raise InvalidSettingsError("loss is not set, and the model is not compiled; set it, or compile the model")
        compiling.check_losses(model, compiled.loss, self.given("label_cols"))

    def given(self, name: str) -> Any:
        """Return the value of a setting, or its default; those of the inputs in the order of the model's inputs."""
        value = super().given(name)
        if name not in ("feature_cols", "input_shapes", "input_dtypes") or not isinstance(value, list):
            return value
        if self._columns_are_changed():
            return value  # which are given the tensors in the order of feature_cols
        order = self._order
        if self._made is None:
            order = compiling.order_by_name(self._model, super().given("feature_cols") or [])
        return value if order is None or len(order) != len(value) else [value[at] for at in order]

    def _columns_are_changed(self) -> bool:
        return any(super(KerasFit, self).given(each) for each in ("transformation_fn", "inference_fn"))

    def compile_arguments(self) -> compiling.CompileArguments:
        return compiling.compile_arguments(self._model, **{name: self.given(name) for name in COMPILED})

    def _losses(self) -> list[Any]:
        """Return the loss of each label; [] if the model adds its own, or is not known yet and may order them."""
        model, labels = self._model, self.given("label_cols") or []
        loss = self.given("loss") if model is None else self.compile_arguments().loss
        if model is None and isinstance(loss, Mapping) and "class_name" not in loss:
            return []
        pairs = compiling.check_losses(model, loss, labels)
        return [loss for _, loss in pairs] * (len(labels) if len(pairs) == 1 else 1)

    def label_dtypes(self) -> list[str | None]:
        return [compiling.label_dtype(loss) for loss in self._losses()]

    def tensors(self, schema: Any) -> Tensors:
        made = super().tensors(schema)
        if self.given("transformation_fn") is not None:
            return made
        if self.given("input_dtypes") is None:
            # Keras casts inputs to the type of the Input. Storing them as that type refuses integers it would round.
            inputs = enumerate(getattr(self._model, "inputs", None) or [])
            floats = {f"{INPUT}{at}" for at, each in inputs if str(each.dtype) == "float32"}
            made |= Tensors({}, dict.fromkeys(floats & made.dtypes.keys(), FLOAT))
        for name, loss in zip(self.given("label_cols"), self._losses(), strict=False):
            kind = compiling.loss_kind(loss)
            alone = isinstance(name, str) and not is_list(schema[name].dataType)
            if kind is not None and kind.labels == "one-hot" and alone:
                named = getattr(loss, "name", None) or getattr(loss, "__name__", loss)
                raise DataError(
                    f"label_cols {name!r} is one number a row, but {named} needs a value for each class: use "
                    "sparse_categorical_crossentropy for class numbers, or make a vector of them (OneHotEncoder with "
                    "dropLast=False)"
                )
        return made

    def dry_run(self) -> None:
        if self._model is None:
            with self._timed("try"):
                self._call_function()
        super().dry_run()

    def _call_function(self) -> None:
        """Call the function that makes the model with the shapes of the rows, and order the inputs by their names."""
        training = Training(**self.common_settings(self.dataset.store, None))
        inputs = numbered(INPUT, Columns(training, needs_labels=False).convert(first_rows(training, ROWS)))
        for at, each in enumerate(inputs):
            if not isinstance(each, np.ndarray) or each.dtype == object:
                raise ragged_column_error(f"{INPUT}{at}", each)
        given = super().given("model")
        try:
            pickled = KerasPickle.of(given, self.given("custom_objects"))
        except Exception as error:
            raise NotPicklableError(
                f"model={name_of(given)} cannot be sent to the workers: {_first_words(error)}. Create what cannot be "
                "sent within the function"
            ) from error
        dtypes = tuple(keras.config.floatx() if each.dtype == np.float64 else each.dtype.str for each in inputs)
        shapes = tuple((-1, *each.shape[1:]) for each in inputs)
        function = KerasFunction.of(pickled, shapes, dtypes, self.given("seed"))
        self._made = function.made()
        self._function = function.with_weights_of(self._made)
        if not self._columns_are_changed():
            columns = [list(field.columns) for field in model_inputs(self.dataset, None)]
            self._order = compiling.order_by_name(self._made, columns)
            if self._order is not None:
                self.dataset = _renumbered(self.dataset, self._order)
        self._check_model()

    def make_training(self, store: Store, resume_from: str | None = None) -> KerasTraining:
        model, compiled = self._built_model(), self.compile_arguments()
        if not compiled.optimizer.built and (steps := int(compiled.optimizer.iterations.numpy())):
            raise InvalidSettingsError(
                f"the optimizer counts {steps} iterations and has no values for the weights, so workers would begin "
                "at 0; call its build(model.trainable_variables) before, or give a schedule that begins there"
            )
        return KerasTraining(
            **self.common_settings(store, resume_from),
            model=self._function or self._pickled_setting("model", model),
            compiled=self._pickled_setting("the compile settings", compiled),
            optimizer_values=compiling.values_of(compiled.optimizer),
            callbacks=self._pickled_setting("callbacks", self.worker_callbacks()),
            config=global_config(),
        )

    def _built_model(self) -> Any:
        """Return the given model if it is built, else a copy that is built for the columns."""
        model, inputs = self._model, model_inputs(self.dataset, self.given("input_shapes"))
        names = compiling.input_names(model)
        if names is not None and len(names) != len(inputs) and self.given("transformation_fn") is None:
            found = ", ".join("+".join(field.columns) for field in inputs)
            raise InvalidSettingsError(
                f"the model has {len(names)} inputs ({', '.join(names)}), and feature_cols make {len(inputs)} "
                f"({found}); a list of lists makes an input of each inner list"
            )
        if self.given("transformation_fn") is None:
            columns, structure = [field.columns for field in inputs], getattr(model, "_inputs_struct", None)
            compiling.check_columns("feature_cols", "inputs", names, columns, structure)
        if compiling.is_built(model):
            return model
        if self.given("transformation_fn") is not None:
            raise InvalidSettingsError(
                "the model is not built, and its inputs are not known because transformation_fn makes them: build it "
                "first, with keras.Input in it, or by calling it on an array"
            )
        return compiling.build_for(model, inputs, self.given("seed"), self.given("custom_objects"))

    def pickled(self, value: Any) -> bytes:
        return dumps(value, self.given("custom_objects"))

    def _pickled_setting(self, name: str, value: Any) -> KerasPickle:
        """Return a pickle of a setting. Raise `InvalidSettingsError` if workers would get another model from it."""
        try:
            made = KerasPickle.of(value, self.given("custom_objects"))
            loaded = made.load() if name == "model" else None
            lost = [] if loaded is None else differences(value, loaded) or different_values(value, loaded)
        except Exception as error:
            raise NotPicklableError(
                f"{name} cannot be sent to the workers: {_first_words(error)}. Layers, models, metrics and schedules "
                "of your own need a get_config that returns all arguments of __init__, and an __init__ that passes "
                "**kwargs on to Keras. Register classes and functions of your own with "
                "@keras.saving.register_keras_serializable(), or give them in custom_objects={...}, so that the "
                f"workers find them by name{f'. Or give a function that makes it: {FORM}' if name == 'model' else ''}"
            ) from error
        if lost:
            raise InvalidSettingsError(
                f"the model that the workers get differs from the given one: {'; '.join(lost[:3])}. What was set after "
                "a layer was made must be in its get_config, or be made in its __init__ or build"
            )
        return made

    def fitted_model(self, fitted: Fitted) -> ElasticKerasModel:
        model = ElasticKerasModel()
        keras_model = fill(self.training.model.load(), self.trained.read(MODEL_FILE))
        model._attach(keras_model, fitted, self.given("custom_objects"), self._function)
        return model

    def identity(self) -> dict[str, Any]:
        compiled = self.compile_arguments()
        effective = {name: getattr(compiled, name) for name in ("optimizer", "loss", "loss_weights")}
        return {
            **super().identity(),
            **{name: described(comparable_config(value)) for name, value in effective.items() if value is not None},
        }

    def described(self, name: str) -> str:
        return described(comparable_config(self._settings.getOrDefault(name)))


def _no_model(given: Any) -> str:
    if given is None:
        return "model is not set"
    kind = type(given)
    if any(each.__module__.startswith("tf_keras") for each in kind.__mro__):
        return "model is of Keras 2 (tf_keras), and this trains those of Keras 3: import keras instead"
    hint = f"; keras.saving.load_model({given!r}) loads one" if str(given).endswith(".keras") else ""
    hint = hint or f"; or a function that returns one: {FORM}"
    return f"model must be a keras.Model, not {given!r:.200} ({kind.__module__}.{kind.__name__}){hint}"


def _renumbered(dataset: Dataset, order: Sequence[int]) -> Dataset:
    """Return the same rows with other numbers of the inputs; `order` has the present number of each."""
    numbers = {f"{INPUT}{at}": f"{INPUT}{number}" for number, at in enumerate(order)}
    manifest = dataset.manifest
    fields = tuple(replace(each, name=numbers.get(each.name, each.name)) for each in manifest.layout.fields)
    settings = dict(manifest.about.get("settings", {}))
    settings["pad_to"] = {numbers.get(name, name): length for name, length in settings.get("pad_to", {}).items()}
    about = {**manifest.about, "settings": settings}
    return replace(dataset, manifest=replace(manifest, layout=replace(manifest.layout, fields=fields), about=about))


def _first_words(error: Exception) -> str:
    """Return the message of an error of Keras without the configurations that follow it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    message = next((line for line in lines if line.startswith("Exception encountered: ")), lines[0] if lines else "")
    return f"{type(error).__name__}: {message.removeprefix('Exception encountered: ').rstrip('.')[:400]}"

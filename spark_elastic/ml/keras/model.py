"""ElasticKerasModel: a trained Keras model as a Spark ML Transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.keras.backend import check_backend
from spark_elastic.ml.model import ElasticModel, Fitted
from spark_elastic.ml.persistence import Codec
from spark_elastic.ml.serving import SavedPredictor
from spark_elastic.ml.trust import TRUST, is_trusted

_ARCHIVE = "model.keras"
_OBJECTS = "custom_objects"
LAMBDA = "<lambda>"
"""As `custom_objects.own_names` calls them."""
_T = TypeVar("_T", bound="ElasticKerasModel")


class ElasticKerasModel(ElasticModel):
    """What `ElasticKerasEstimator.fit` returns: `transform` appends the outputs of the trained model.

    keras_model: the trained `keras.Model`, not compiled.
    history: a row for each epoch. events: the membership timeline.

    Raises: MissingExtraError: TensorFlow is not installed.
    """

    NATIVE = "keras_model"
    _keras_model: Any = None
    _custom_objects: Mapping[str, Any] = {}

    def __init__(self, **settings: Any) -> None:
        check_backend(type(self).__name__)
        super().__init__(**settings)

    @property
    def keras_model(self) -> Any:
        """The trained Keras model, not compiled. Not a copy."""
        if self._keras_model is None:
            raise InvalidSettingsError(f"this {type(self).__name__} was not made by a fit, and has no keras_model")
        return self._keras_model

    @classmethod
    def load(cls: type[_T], path: str, *, trusted: bool = False, custom_objects: Mapping[str, Any] | None = None) -> _T:
        """Load a model that was saved at `path`.

        trusted: whether code that the files name may be run: needed for classes and functions of your own, unless they
            are registered with Keras in this process (`@keras.saving.register_keras_serializable()`), and for Lambda
            layers.
        custom_objects: such classes and functions by their names; what the files say of them is then not looked at. The
            way without trust.
        Raises: CheckpointError: nothing of this kind is there, it is damaged, or it needs trust.
        """
        reader = cls.read().trusted(trusted)
        return (reader if custom_objects is None else reader.instead(custom_objects=dict(custom_objects))).load(path)

    @classmethod
    def _codec(cls) -> Codec:
        check_backend(cls.__name__)
        from spark_elastic.ml.keras import safe_objects

        return safe_objects

    def _attach(self, model: Any, fitted: Fitted, custom_objects: Mapping[str, Any] | None = None) -> None:
        self._keras_model, self._fitted, self._custom_objects = model, fitted, dict(custom_objects or {})

    def _saved_predictor(self) -> SavedPredictor:
        from spark_elastic.ml.keras.pickling import Sealed
        from spark_elastic.ml.keras.predictor import KerasSavedPredictor

        return KerasSavedPredictor(
            Sealed.of(self.keras_model, self._custom_objects),
            self.getOrDefault("transform_device"),
            self.getOrDefault("transform_threads"),
        )

    # Saving. The architecture is a configuration, which runs no code; the classes that it names and Keras does not have
    # are stored apart.

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), _OBJECTS: self._own_names()}

    def _files(self) -> dict[str, bytes]:
        from spark_elastic.ml.keras import archives

        return {_ARCHIVE: archives.dumps(self.keras_model)}

    def _objects(self) -> dict[str, Any]:
        from spark_elastic.ml.keras.custom_objects import custom_objects_of

        names = _of_classes(self._own_names())
        return {_OBJECTS: custom_objects_of(self.keras_model, names, self._custom_objects)} if names else {}

    def _running(self) -> list[str]:
        return ["Lambda layers"] if LAMBDA in self._own_names() else []

    @classmethod
    def _at_hand(cls, facts: Mapping[str, Any]) -> dict[str, Any]:
        import keras

        found = {name: keras.saving.get_registered_object(name) for name in _of_classes(facts[_OBJECTS])}
        return {_OBJECTS: found} if found and None not in found.values() else {}

    def _restore(self, facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> None:
        from spark_elastic.ml.keras import archives

        super()._restore(facts, files, objects)
        given, safe = objects.get(_OBJECTS, {}), not is_trusted()
        if safe and LAMBDA in facts[_OBJECTS]:
            raise CheckpointError(f"{_ARCHIVE} has Lambda layers, which are code that loading it runs. {TRUST}")
        try:
            self._keras_model = archives.loads(files[_ARCHIVE], given, safe=safe)
        except Exception as error:  # Keras has all kinds of them
            why = str(error).partition("\n")[0]
            needed = [name for name in facts[_OBJECTS] if name not in given]
            hint = f" (it needs {', '.join(needed)})" if needed else ""
            raise CheckpointError(f"{_ARCHIVE} cannot be loaded: {type(error).__name__}: {why}{hint}") from error
        self._custom_objects = given

    def _own_names(self) -> list[str]:
        from spark_elastic.ml.keras import archives
        from spark_elastic.ml.keras.custom_objects import own_names

        return own_names(self.keras_model, archives.architecture(self.keras_model))


def _of_classes(names: Sequence[str]) -> list[str]:
    """Without lambdas, which are in the archive itself."""
    return [name for name in names if name != LAMBDA]

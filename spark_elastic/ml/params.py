"""How settings become Spark ML Params: declared once, with a getter, a setter and a check each.

::

    class TrainingParams(ElasticParams):
        epochs = setting("epochs", "passes over the rows.", whole(at_least=1), default=1)

gives `epochs` as a keyword of the constructor, `getEpochs()`, `setEpochs(value)`, `explainParam("epochs")`, and a Param
to put into param maps. What is declared without a default is None until it is set.
"""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params

from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.ml.converters import Converter

_Self = TypeVar("_Self", bound="ElasticParams")

_OTHER_NAMES = {
    "features_col": "feature_cols",
    "input_cols": "feature_cols",
    "input_col": "feature_cols",
    "label_col": "label_cols",
    "target_cols": "label_cols",
    "weight_col": "sample_weight_col",
    "validation_indicator_col": "validation",
    "validation_split": "validation",
    "output_col": "output_cols",
    "predictions_col": "prediction_col",
    "max_iter": "epochs",
    "num_epochs": "epochs",
    "num_workers": "num_proc",
    "random_seed": "seed",
    "train_minibatch_fn": "train_fn",
    "training_step": "train_fn",
    "backward_passes_per_step": "accumulation_steps",
    "compression": "gradient_compression",
    "use_gpu": "device",
    "nthread": "num_threads",
    "step_size": "optimizer",
    "learning_rate": "optimizer",
}
"""What Horovod, Spark ML, xgboost and torch call these settings."""


def setting(name: str, doc: str, convert: Converter, default: Any = None) -> Any:
    """A Param of a class; its value None stands for "not set" and is never converted.

    default: a plain value, so that saved defaults can be read by people.
    """

    def checked(value: Any) -> Any:
        return None if value is None else convert(name, value)

    declared = Param(Params._dummy(), name, doc, checked)
    declared.default = default
    return declared


class ElasticParams(Params):
    """Base of what has settings. Constructors take them as keywords alone.

    Raises:
        InvalidSettingsError: a name that does not exist, with the nearest that does; or an impossible value.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._setDefault(**{declared.name: declared.default for declared in self.params})
        self._check_names(settings)
        self._set(**{name: value for name, value in settings.items() if value is not None})
        self._check_together()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for declared in vars(cls).copy().values():
            if isinstance(declared, Param):
                _add_accessors(cls, declared)
        every = [each for each in (getattr(cls, name, None) for name in dir(cls)) if isinstance(each, Param)]
        keywords = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(each, "default", None))
            for each in every
        ]
        cls.__signature__ = inspect.Signature(keywords)  # what editors and help() show

    def set(self, param: Any, value: Any) -> None:
        """As in Spark ML; the error of a wrong value keeps its type."""
        self._shouldOwn(param)
        self._paramMap[param] = param.typeConverter(value)

    def copy(self: _Self, extra: Any = None) -> _Self:
        """A copy with the same uid and, if given, other settings: `{estimator.epochs: 3}`."""
        that: _Self = super().copy(extra)
        # Spark's copy shares this list, and a later _resetUid of the copy would rename the original's Params.
        that._params = None
        for declared in self.params:
            setattr(that, declared.name, copy.copy(declared))
        that._check_together()
        return that

    def _given(self, name: str) -> Any:
        """The value, or its default."""
        return self.getOrDefault(name)

    def _check_together(self) -> None:
        """Overridden to raise InvalidSettingsError where settings contradict one another. Missing ones are fine."""

    def _check_names(self, settings: dict[str, Any]) -> None:
        known = [declared.name for declared in self.params]
        for name in settings:
            if name not in known:
                raise InvalidSettingsError(unknown_name(type(self).__name__, name, known))


def unknown_name(owner: str, name: str, known: list[str]) -> str:
    """What to say about a keyword that does not exist."""
    snake = re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: f"_{match[1].lower()}", name)
    if snake != name and snake in known:
        return f"{owner} has no {name!r}: names are written in snake_case here, {snake!r}"
    other = _OTHER_NAMES.get(snake)
    if other in known:
        return f"{owner} has no {name!r}; here it is {other!r}"
    close = nearest(snake, known)
    return f"{owner} has no {name!r}" + (f"; did you mean {close!r}?" if close else f"; it has {', '.join(known)}")


def _add_accessors(cls: type, declared: Any) -> None:
    """`getBatchSize` and `setBatchSize` for `batch_size`, unless the class writes its own."""
    name = declared.name
    ending = "".join(part.capitalize() for part in name.split("_"))

    def getter(self: Any) -> Any:
        return self.getOrDefault(name)

    def setter(self: Any, value: Any) -> Any:
        self.set(self.getParam(name), value)
        return self

    for method, prefix, doc in (
        (getter, "get", f"`{name}`: {declared.doc}"),
        (setter, "set", f"Set `{name}`: {declared.doc}\n\nReturns: itself."),
    ):
        accessor = f"{prefix}{ending}"
        if accessor not in vars(cls):
            method.__name__, method.__qualname__, method.__doc__ = accessor, f"{cls.__name__}.{accessor}", doc
            setattr(cls, accessor, method)

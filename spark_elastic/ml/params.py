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
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from pyspark.ml.param import Param, Params

from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.settings import whole_number

# What a setting of an estimator may be: one function a kind, each of which returns the plain value or says why not.
#
# Each takes the setting's name and the value that was given.

Converter = Callable[[str, Any], Any]


def _wrong(name: str, wanted: str, value: Any) -> InvalidSettingsError:
    shown = repr(value)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
    return InvalidSettingsError(f"{name} must be {wanted}, not {shown} ({type(value).__name__})")


def whole(at_least: int) -> Converter:
    return lambda name, value: whole_number(name, value, at_least)


def real(*, above: float | None = None, at_least: float | None = None) -> Converter:
    """A finite number within a lower bound, as a float."""
    bound = f" above {above:g}" if above is not None else f" of at least {at_least:g}" if at_least is not None else ""

    def convert(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise _wrong(name, f"a number{bound}", value)
        number = float(value)
        if (above is not None and number <= above) or (at_least is not None and number < at_least):
            raise _wrong(name, f"a number{bound}", value)
        return number

    return convert


def boolean(name: str, value: Any) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's too
        raise _wrong(name, "True or False", value)
    return bool(value)


def text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, "a name", value)
    return str(value)


def identifier(name: str, value: Any) -> str:
    """A name that can be a folder's."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w=-][\w.=-]*", value):
        raise _wrong(name, "letters, digits, '_', '-', '=' and '.', which does not come first", value)
    return str(value)


def one_of(*choices: str) -> Converter:
    def convert(name: str, value: Any) -> str:
        if value not in choices:
            raise _wrong(name, f"one of {', '.join(map(repr, choices))}", value)
        return str(value)

    return convert


def path(name: str, value: Any) -> str:
    """A path or URI, as text."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise _wrong(name, "a path or a URI", value)
    return str(value)


def names(name: str, value: Any) -> list[str]:
    """Different names, at least one; a single one may stand alone."""
    listed = [value] if isinstance(value, str) else value
    if not _is_list(listed) or not all(isinstance(each, str) and each for each in listed):
        raise _wrong(name, "a list of names", value)
    if not listed:
        raise InvalidSettingsError(f"{name} must name at least one column")
    _no_repeats(name, listed)
    return list(map(str, listed))


def names_or_none(name: str, value: Any) -> list[str]:
    """Like `names`; an empty list is fine."""
    return [] if _is_list(value) and len(value) == 0 else names(name, value)


def grouped_names(name: str, value: Any) -> list[Any]:
    """Names, or lists of names: `["a", "b"]`, `[["a", "b"], ["c"]]`. Names and lists are not mixed."""
    if _is_list(value) and any(_is_list(each) for each in value):
        if not all(_is_list(each) for each in value):
            raise InvalidSettingsError(
                f"{name} mixes names and lists of names: {value!r}; give a list for each input, or names alone"
            )
        return [names(f"{name}[{index}]", each) for index, each in enumerate(value)]
    return names(name, value)


def shapes(name: str, value: Any) -> list[list[int]]:
    """One shape for each tensor, without the rows: `[[28, 28], []]`. A single shape may stand alone: `(28, 28)`."""
    if _is_list(value) and len(value) and not any(_is_list(each) for each in value):
        value = [value]
    if not _is_list(value) or not len(value) or not all(_is_list(each) for each in value):
        raise _wrong(name, "a list of shapes, such as [(28, 28), (5,)]", value)
    return [[whole_number(f"{name}[{i}]", size, at_least=1) for size in shape] for i, shape in enumerate(value)]


def dtypes(name: str, value: Any) -> list[str | None]:
    """numpy's name of a type of numbers for each tensor, or None: `["int64", None]`. A single one may stand alone."""
    listed = value if _is_list(value) else [value]
    if not len(listed):
        raise _wrong(name, "a list of types, such as ['int64', 'float32']", value)
    made: list[str | None] = []
    for index, each in enumerate(listed):
        try:
            dtype = None if each is None else np.dtype(each)
        except TypeError:
            raise _wrong(f"{name}[{index}]", "a type that numpy knows, such as 'int64'", each) from None
        if dtype is not None and (dtype.kind not in "biuf" or dtype.itemsize > 8):
            raise _wrong(f"{name}[{index}]", "a type of numbers of at most 8 bytes, such as 'int64'", each)
        made.append(None if dtype is None else dtype.name)
    return made


def numbers_list(name: str, value: Any) -> list[float]:
    if not _is_list(value) or not len(value):
        raise _wrong(name, "a list of numbers", value)
    return [real(at_least=0)(f"{name}[{i}]", each) for i, each in enumerate(value)]


def fraction_or_column(name: str, value: Any) -> float | str:
    if isinstance(value, str) and value:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong(name, "a fraction of the rows, or the name of a boolean column", value)
    if not 0 < float(value) < 1:
        raise InvalidSettingsError(
            f"{name} must be a fraction between 0 and 1 (both excluded), such as 0.1, or the name of a boolean column, "
            f"not {value}; leave it out (None) to train on all rows"
        )
    return float(value)


def function(name: str, value: Any) -> Any:
    if not callable(value):
        raise _wrong(name, "a function", value)
    return value


def dictionary(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        raise _wrong(name, "a dict with names as keys", value)
    return dict(value)


def options(known: Sequence[str]) -> Converter:
    """A dict whose keys are among `known`."""

    def convert(name: str, value: Any) -> dict[str, Any]:
        given = dictionary(name, value)
        for key in given:
            if key not in known:
                close = nearest(key, known)
                raise InvalidSettingsError(
                    f"{name} takes no {key!r}"
                    + (f"; did you mean {close!r}?" if close else f"; it takes {', '.join(known)}")
                )
        return given

    return convert


def anything(name: str, value: Any) -> Any:
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or type(value).__name__ in ("ndarray", "Size")


def _no_repeats(name: str, listed: Sequence[str]) -> None:
    repeated = sorted({each for each in listed if list(listed).count(each) > 1})
    if repeated:
        raise InvalidSettingsError(f"{name} names {', '.join(repeated)} more than once")


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

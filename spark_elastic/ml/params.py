"""Settings as Spark ML Params: each is declared once, with its type, default, check and documentation.

::

    class BatchParams(ElasticParams):
        epochs, getEpochs, setEpochs = setting("passes over the rows.", whole(at_least=1), default=1)

makes a Param for param maps and `explainParam("epochs")`, and its getter and setter. The signatures of the estimators
repeat name and default, for people and tools; a test compares them with the declarations. A setting that is declared
without a default is None until it is set.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import numpy as np
from pyspark.ml.param import Param, Params

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError, nearest
from spark_elastic.reporting.descriptions import describe_setting
from spark_elastic.settings import accepting, whole_number, wrong
from spark_elastic.settings import boolean as boolean
from spark_elastic.settings import dictionary as dictionary
from spark_elastic.settings import identifier as identifier
from spark_elastic.task.user_frames import without_own_frames
from spark_elastic.trackers.autologging import reads_settings

Converter = Callable[[str, Any], Any]  # of name and value, to the plain value; raises `InvalidSettingsError`


def whole(at_least: int) -> Callable[[str, int], int]:
    return lambda name, value: whole_number(name, value, at_least)


def real(*, above: float | None = None, at_least: float | None = None) -> Callable[[str, float], float]:
    bound = f" above {above:g}" if above is not None else f" of at least {at_least:g}" if at_least is not None else ""

    def convert(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise wrong(name, f"a number{bound}", value)
        number = float(value)
        if (above is not None and number <= above) or (at_least is not None and number < at_least):
            raise wrong(name, f"a number{bound}", value)
        return number

    return convert


def one_of(*choices: str, hint: str = "") -> Converter:
    return accepting(f"one of {', '.join(map(repr, choices))}", lambda value: value in choices, str, hint)


text: Callable[[str, str], str] = accepting("a name", lambda value: isinstance(value, str) and value, str)


def text_or_none(name: str, value: str | None) -> str:
    """Convert to a name; None is "", because it would stand for a default."""
    return text(name, value) if value else ""


function: Callable[[str, Callable[..., Any]], Any] = accepting("a function", callable)


def path(name: str, value: str | os.PathLike[str], wanted: str = "a path or a URI") -> str:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise wrong(name, wanted, value)
    return str(value)


def location(name: str, value: str | os.PathLike[str] | Store) -> Any:
    return value if isinstance(value, (Store, os.PathLike)) else path(name, value, "a path, a URI or a Store")


def names(name: str, value: str | Sequence[str]) -> list[str]:
    """Convert to a list of names; a str is a list of one. An empty list, or a name given twice, is an error."""
    listed = [value] if isinstance(value, str) else value
    if not _is_list(listed) or not all(isinstance(each, str) and each for each in listed):
        raise wrong(name, "a list of names", value)
    if not listed:
        raise InvalidSettingsError(f"{name} must name at least one column")
    repeated = sorted({each for each in listed if list(listed).count(each) > 1})
    if repeated:
        raise InvalidSettingsError(f"{name} names {', '.join(repeated)} more than once")
    return list(map(str, listed))


def names_or_none(name: str, value: str | Sequence[str]) -> list[str]:
    return [] if _is_list(value) and len(value) == 0 else names(name, value)


def grouped_names_or_none(name: str, value: Any) -> list[Any]:
    return [] if _is_list(value) and len(value) == 0 else grouped_names(name, value)


def grouped_names(name: str, value: str | Sequence[str] | Sequence[Sequence[str]]) -> list[Any]:
    """Convert to a list of names, or a list of lists of names: `["a", "b"]`, `[["a", "b"], ["c"]]`."""
    if _is_list(value) and any(_is_list(each) for each in value):
        if not all(_is_list(each) for each in value):
            raise InvalidSettingsError(
                f"{name} mixes names and lists of names: {value!r}; give lists alone, [['a', 'b'], ['c']], or names"
            )
        return [names(f"{name}[{index}]", each) for index, each in enumerate(value)]
    return names(name, value)  # type: ignore[arg-type]


def shapes(name: str, value: Any) -> list[list[int] | None]:
    """Convert to a shape, without the rows, or None per tensor: `[[28, 28], None]`. One shape needs no list."""
    if _is_list(value) and len(value) and not any(each is None or _is_list(each) for each in value):
        value = [value]
    if not _is_list(value) or not len(value) or not all(each is None or _is_list(each) for each in value):
        raise wrong(name, "a list of shapes, such as [(28, 28), None] (None: as in its column)", value)
    return [
        shape if shape is None else [whole_number(f"{name}[{i}]", size, at_least=1) for size in shape]
        for i, shape in enumerate(value)
    ]


def dtypes(name: str, value: Any) -> list[str | None]:
    """Convert to numpy's name of a number type per tensor, or None: `["int64", None]`. A single type needs no list."""
    listed = value if _is_list(value) else [value]
    if not len(listed):
        raise wrong(name, "a list of types, such as ['int64', 'float32']", value)
    made: list[str | None] = []
    for index, each in enumerate(listed):
        try:
            dtype = None if each is None else np.dtype(each)
        except TypeError:
            raise wrong(f"{name}[{index}]", "a numpy type, such as 'int64'", each) from None
        if dtype is not None and (dtype.kind not in "biuf" or dtype.itemsize > 8):
            raise wrong(f"{name}[{index}]", "a number type of at most 8 bytes, such as 'int64'", each)
        made.append(None if dtype is None else dtype.name)
    return made


def numbers_list(name: str, value: Any) -> list[float]:
    """Convert to a list of at least one number, none of them negative."""
    if not _is_list(value) or not len(value):
        raise wrong(name, "a list of numbers", value)
    return [real(at_least=0)(f"{name}[{i}]", each) for i, each in enumerate(value)]


def fraction_or_column(name: str, value: Any) -> float | str:
    if isinstance(value, str) and value:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise wrong(name, "a fraction of the rows, or the name of a boolean column", value)
    if not 0 < float(value) < 1:
        raise InvalidSettingsError(
            f"{name} must be a fraction between 0 and 1 (both excluded), such as 0.1, or the name of a boolean column, "
            f"not {value}; leave it out (None) to train on all rows"
        )
    return float(value)


def missing(name: str, value: Any) -> str | float:
    if value in ("error", "skip"):
        return str(value)
    if isinstance(value, (bool, str)) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise wrong(name, "'error', 'skip' or a number", value)
    return float(value)


def options(known: Sequence[str]) -> Callable[[str, Mapping[str, Any]], dict[str, Any]]:
    def convert(name: str, value: Any) -> dict[str, Any]:
        given: dict[str, Any] = dictionary(name, value)
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


def as_list(value: Any) -> list[Any]:
    """Return the entries of a setting of which a single one may be given without a list; [] for None."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or type(value).__name__ in ("ndarray", "Size")


_OTHER_NAMES = {
    "feature_cols": ("features_col", "input_cols", "input_col"),
    "label_cols": ("label_col", "target_cols"),
    "sample_weight_col": ("weight_col",),
    "validation": ("validation_indicator_col", "validation_split"),
    "output_cols": ("output_col",),
    "prediction_col": ("predictions_col",),
    "epochs": ("max_iter", "num_epochs"),
    "num_proc": ("num_workers",),
    "seed": ("random_seed",),
    "train_fn": ("train_minibatch_fn", "training_step"),
    "accumulation_steps": ("backward_passes_per_step",),
    "gradient_compression": ("compression",),
    "device": ("use_gpu",),
    "num_threads": ("nthread",),
    "optimizer": ("step_size", "learning_rate"),
}
"""Names of these settings in Horovod, Spark ML, xgboost and torch."""


Self = TypeVar("Self", bound="ElasticParams")
A = TypeVar("A")
S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class DeclaredParam(Param[Any]):
    """A Param with a default, which has the name of the class attribute that it is assigned to."""

    def __init__(self, doc: str, convert: Converter, default: Any) -> None:
        super().__init__(Params._dummy(), "", doc, self._convert)
        self._convert_given = convert
        self.default = default
        self.accessors: tuple[Any, ...] = ()  # getter and setter

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        words, about = name.title().replace("_", ""), f"`{name}`: {self.doc}"
        docs = {"get": about, "set": f"Set {about}\n\nReturns:\n    The object itself."}
        for function, (verb, doc) in zip(self.accessors, docs.items(), strict=False):
            function.__name__ = function.__qualname__ = f"{verb}{words}"
            function.__doc__ = doc

    def _convert(self, value: Any) -> Any:
        return None if value is None and self.default is None else self._convert_given(self.name, value)


@overload
def setting(
    doc: str, convert: Callable[[str, T], Any]
) -> tuple[Param[T | None], Callable[[Any], T | None], Callable[[S, T | None], S]]: ...


@overload
def setting(
    doc: str, convert: Callable[[str, T], Any], default: T
) -> tuple[Param[T], Callable[[Any], T], Callable[[S, T], S]]: ...


def setting(doc: str, convert: Converter, default: Any = None) -> Any:
    """Declare a setting: return its Param and, in the names that pyspark's users expect, its getter and setter.

    The default is plain, for readable files. None is converted unless it is the default. The type of a setting is that
    of the values which the converter takes.
    """
    declared = DeclaredParam(doc, convert, default)

    def get(self: Any) -> Any:
        return self.getOrDefault(declared.name)

    def set_(self: Any, value: Any) -> Any:
        self.set(self.getParam(declared.name), value)
        return self

    declared.accessors = get, set_
    return declared, get, set_


def keyword_only(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a method take settings as keywords alone, check their names, and keep the given ones in `_input_kwargs`."""

    @without_own_frames(lambda *_, **__: False)
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **settings: Any) -> Any:
        cls = type(self)
        if args:
            raise TypeError(f"{cls.__name__} takes its settings as keywords, not as positional arguments")
        known = sorted(name for name in dir(cls) if isinstance(getattr(cls, name, None), Param))
        for name in settings:
            if name not in known:
                raise InvalidSettingsError(unknown_name(cls.__name__, name, known))
        self._input_kwargs = settings
        return method(self, **settings)  # type: ignore[call-arg]

    return wrapper  # type: ignore[return-value]


def same_keywords(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[[S], R]], Callable[Concatenate[S, P], R]]:
    """Give a method without arguments the keywords of a constructor; it finds them in `_input_kwargs`."""

    def decorate(method: Callable[[S], R]) -> Callable[Concatenate[S, P], R]:
        def with_settings(self: Any, **settings: Any) -> Any:
            return method(self)

        made: Any = functools.wraps(init)(with_settings)  # its signature
        made.__name__, made.__qualname__, made.__doc__ = method.__name__, method.__qualname__, method.__doc__
        return keyword_only(made)

    return decorate


def with_keywords_of(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[[type[S], A, dict[str, Any]], R]], Callable[Concatenate[type[S], A, P], R]]:
    """Give another constructor, of one argument and a dict of settings, the keywords of `__init__`."""

    def decorate(method: Callable[[type[S], A, dict[str, Any]], R]) -> Callable[Concatenate[type[S], A, P], R]:
        @functools.wraps(method)
        def with_settings(cls: Any, first: Any, /, **settings: Any) -> Any:
            return method(cls, first, settings)

        first_two = list(inspect.signature(method).parameters.values())[:2]
        keywords = [each for each in inspect.signature(init).parameters.values() if each.kind is each.KEYWORD_ONLY]
        made: Any = with_settings
        made.__signature__ = inspect.Signature(
            [*first_two, *(each for each in keywords if each.name != first_two[1].name)]
        )
        return made  # type: ignore[no-any-return]

    return decorate


class ElasticParams(Params):
    """Base of everything that has settings: the constructor takes them as keywords, and each one is a Param."""

    _input_kwargs: dict[str, Any]  # the settings of the last call of a `keyword_only` method, as in pyspark

    @keyword_only
    def __init__(self, /, **settings: Any) -> None:
        super().__init__()
        declared: list[Any] = self.params
        self._setDefault(**{each.name: each.default for each in declared})
        self._set(**settings)
        self._check_together()

    def _set(self: Self, **settings: Any) -> Self:
        """Set several Params, as in Spark ML, where a None would be set without its converter."""
        for name, value in settings.items():
            self.set(self.getParam(name), value)
        return self

    def set(self, param: Any, value: Any) -> None:
        """Set a Param, as in Spark ML, but raise the converter's own error; Spark would raise a plain ValueError."""
        self._shouldOwn(param)
        self._paramMap[param] = param.typeConverter(value)

    def isDefined(self, param: Any) -> bool:
        """As in Spark ML. MLflow's autologging, which logs what is defined, hears only of values that are not None."""
        defined = bool(super().isDefined(param))
        return defined and not (reads_settings() and super().getOrDefault(param) is None)

    def getOrDefault(self, param: Any) -> Any:
        """As in Spark ML. MLflow's autologging is given a description, without addresses and credentials."""
        value = super().getOrDefault(param)
        return describe_setting(getattr(param, "name", param), value) if reads_settings() else value

    def copy(self: Self, extra: Any = None) -> Self:
        """Return a copy with the same uid and, if given, other settings: `{estimator.epochs: 3}`."""
        that: Self = super().copy(extra)
        # Spark's copy shares this list, and a later _resetUid of the copy would rename the original's Params.
        that._params = None
        for declared in self.params:
            setattr(that, declared.name, copy.copy(declared))
        that._check_together()
        return that

    def _given(self, name: str) -> Any:
        return self.getOrDefault(name)

    def _is_given(self, name: str) -> bool:
        return bool(self.isSet(name)) and self._given(name) is not None

    def _check_together(self) -> None:
        """Raise `InvalidSettingsError` if settings contradict one another. Missing settings are fine here."""

    def _set_given(self: Self) -> Self:
        """Set the keywords that the running `keyword_only` method was called with; the body of `setParams`."""
        self._set(**self._input_kwargs)
        self._check_together()
        return self


def unknown_name(owner: str, name: str, known: list[str]) -> str:
    """Return the message for a keyword that does not exist, with the setting that is probably meant."""
    snake = re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: f"_{match[1].lower()}", name)
    if snake != name and snake in known:
        return f"{owner} has no {name!r}: names are written in snake_case here, {snake!r}"
    other = next((name for name, others in _OTHER_NAMES.items() if snake in others), None)
    if other in known:
        return f"{owner} has no {name!r}; here it is {other!r}"
    close = nearest(snake, known)
    return f"{owner} has no {name!r}" + (f"; did you mean {close!r}?" if close else f"; it has {', '.join(known)}")

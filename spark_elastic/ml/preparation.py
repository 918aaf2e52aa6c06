"""From columns to tensors: which tensors a DataFrame's columns become, and the arrays of a batch to train on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from spark_elastic.data.columns import INTEGERS, REALS, TEXTS, TIMES, element_type, find_column
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.manifest import TensorField
from spark_elastic.data.reader import Batch
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.training.spec import Training

INPUT, LABEL, WEIGHT = "features_", "label_", "sample_weight"  # names of tensors, the first two before a number
_OPAQUE = TEXTS | {"binary"}
FLOAT, INTEGER = "<f4", "<i8"


@dataclass(frozen=True)
class Tensors:
    """Arguments of `materialize`: by tensor its column or columns to join, and dtype and shape where they differ."""

    columns: Mapping[str, str | tuple[str, ...]]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __or__(self, other: Tensors) -> Tensors:
        return Tensors(
            {**self.columns, **other.columns}, {**self.dtypes, **other.dtypes}, {**self.shapes, **other.shapes}
        )


def numbered(prefix: str, tensors: Mapping[str, Any]) -> list[Any]:
    """Return the values of prefix0, prefix1, ... up to the first one that is missing."""
    found: list[Any] = []
    while f"{prefix}{len(found)}" in tensors:
        found.append(tensors[f"{prefix}{len(found)}"])
    return found


def model_inputs(dataset: Dataset, shapes: Sequence[Sequence[int] | None] | None) -> tuple[TensorField, ...]:
    """Return the fields of features_0, features_1, ...; a shape in the setting `input_shapes` replaces the stored."""
    stored = numbered(INPUT, {each.name: each for each in dataset.layout.fields})
    given = itertools.chain(shapes or (), itertools.repeat(None))
    return tuple(
        each if shape is None else replace(each, shape=tuple(shape)) for each, shape in zip(stored, given, strict=False)
    )


def flat_names(names: Sequence[Any]) -> list[str]:
    return [each for name in names for each in (name if isinstance(name, list) else [name])]


def features(
    schema: Any,
    feature_cols: Sequence[Any],
    input_shapes: Sequence[Sequence[int] | None] | None,
    input_dtypes: Sequence[str | None] | None = None,
    allow_text: bool = True,
) -> Tensors:
    """Return the tensors "features_0", "features_1", ... of the model's inputs, for settings of the estimator.

    Several scalar columns in a flat list are one input of float32, as layers of weights need it. A single column, and
    an inner list, are integers if all of their columns are.

    Raises:
        DataError: A column is missing, or no tensor can be made of its type; of text and binary with `allow_text`.
        InvalidSettingsError: The number of shapes or dtypes is not that of the inputs, or a dtype is for text.
    """
    nested = any(isinstance(each, (list, tuple)) for each in feature_cols)
    types = () if nested else [find_column(schema, name, "feature_cols").dataType for name in feature_cols]
    if nested or any(is_list(each) or element_type(each) in _OPAQUE for each in types):
        groups = [list(each) if nested else [each] for each in feature_cols]
    else:
        groups = [list(feature_cols)]
    for name, given in (("input_shapes", input_shapes), ("input_dtypes", input_dtypes)):
        if given is not None and len(given) != len(groups):
            inputs = ", ".join("+".join(group) for group in groups)
            raise InvalidSettingsError(f"{len(given)} {name} for {len(groups)} inputs ({inputs}); give one for each")
    made = Tensors({})
    for index, group in enumerate(groups):
        shape = None if input_shapes is None else input_shapes[index]
        dtype = None if input_dtypes is None else input_dtypes[index]
        if dtype is None and len(group) > 1 and not nested:
            dtype = FLOAT
        made |= _tensor(schema, f"{INPUT}{index}", group, shape, "feature_cols", allow_text, dtype=dtype)
    return made


def labels(
    schema: Any,
    label_cols: Sequence[str | Sequence[str]],
    label_shapes: Sequence[Sequence[int] | None] | None,
    dtypes: Sequence[str | None] = (),
    allow_text: bool = True,
) -> Tensors:
    """Return the tensors "label_0", "label_1", ... Raises as `features` does.

    `dtypes` are the types that the losses need; for None integers stay integers, and the rest becomes float32.
    """
    if label_shapes is not None and len(label_shapes) != len(label_cols):
        raise InvalidSettingsError(f"{len(label_shapes)} label_shapes for {len(label_cols)} label_cols")
    made = Tensors({})
    for index, each in enumerate(label_cols):
        shape = None if label_shapes is None else label_shapes[index]
        alone, names = isinstance(each, str), flat_names([each])
        one = _tensor(schema, f"{LABEL}{index}", names, shape, "label_cols", allow_text, alone_is_scalar=alone)
        if not alone and len(names) == 1 and one.dtypes and not is_list(schema[names[0]].dataType):
            one = replace(one, columns={f"{LABEL}{index}": tuple(names)})  # [rows, 1], of integers too
        dtype = dtypes[index] if index < len(dtypes) else None
        # a list of reals may be a probability for each class
        whole = alone and not is_list(schema[names[0]].dataType)
        if dtype is not None and one.dtypes and (dtype == FLOAT or whole):
            one = Tensors(one.columns, {f"{LABEL}{index}": dtype}, one.shapes)
        made |= one
    return made


def weight(schema: Any, name: str) -> Tensors:
    """Return the tensor of the sample weights. Raises `DataError` if the column is missing or not a number."""
    if element_type(find_column(schema, name, "sample_weight_col").dataType) not in INTEGERS | REALS:
        raise DataError(f"sample_weight_col {name!r} is {_type_name(schema, name)}; weights must be numbers")
    return Tensors({WEIGHT: name}, {WEIGHT: FLOAT})


def _tensor(
    schema: Any,
    tensor: str,
    names: Sequence[str],
    shape: Sequence[int] | None,
    setting: str,
    allow_text: bool,
    alone_is_scalar: bool = False,
    dtype: str | None = None,
) -> Tensors:
    """Return one tensor of one or more columns; without `dtype` int64 for integers and times, float32 for the rest."""
    kinds = [element_type(find_column(schema, name, setting).dataType) for name in names]
    shapes = {} if shape is None else {tensor: tuple(shape)}
    if any(kind in _OPAQUE for kind in kinds):
        if len(names) > 1:
            raise DataError(f"{setting} {list(names)}: strings and binary cannot be joined with other columns")
        if dtype is not None:
            raise InvalidSettingsError(
                f"input_dtypes has {dtype!r} for {names[0]!r}, which is {_type_name(schema, names[0])}; make it None"
            )
        bytes_of_features = kinds == ["binary"] and setting == "feature_cols"
        if not allow_text and not (bytes_of_features and shape is not None):
            remedy = "StringIndexer makes numbers of classes" if setting == "label_cols" else "make numbers of it"
            if bytes_of_features:
                remedy = "input_shapes=[(height, width)] makes uint8 of bytes of one length"
            raise DataError(
                f"{setting} {names[0]!r} is {_type_name(schema, names[0])}, which a model cannot take; {remedy}, or a "
                "transformation_fn makes arrays of each batch"
            )
        return Tensors({tensor: names[0]}, shapes=shapes)
    # `materialize` checks everything else about a column.
    if dtype is None:
        dtype = INTEGER if all(kind in INTEGERS | TIMES for kind in kinds) else FLOAT
    integer = np.dtype(dtype).kind in "iu"
    alone = len(names) == 1 and (alone_is_scalar or integer or is_list(schema[names[0]].dataType))
    return Tensors({tensor: names[0] if alone else tuple(names)}, {tensor: np.dtype(dtype).str}, shapes)


def is_list(spark_type: Any) -> bool:
    return spark_type.typeName() in ("array", "vectorudt")


def _type_name(schema: Any, name: str) -> str:
    return str(schema[name].dataType.simpleString())


class Columns:
    """Converts a batch to the columns to train on: gives them the shapes set, calls `transformation_fn`."""

    def __init__(self, training: Training, needs_labels: bool = True) -> None:
        self._transformation = training.transformation_fn
        self._shapes = {
            f"{prefix}{index}": shape
            for prefix, shapes in ((INPUT, training.input_shapes), (LABEL, training.label_shapes))
            for index, shape in enumerate(shapes or ())
        }
        # with `needs_labels`, that function must return the labels and weights of the dataset
        names = [field.name for field in training.dataset.layout.fields] if needs_labels else []
        self._needed = [name for name in names if name.startswith(LABEL) or name == WEIGHT]

    def convert(self, batch: Batch) -> Mapping[str, Any]:
        """Return the columns by name. Raises `DataError` if `transformation_fn` returned unusable ones."""
        rows = batch.rows
        columns: Mapping[str, Any] = {
            name: reshaped(value, self._shapes.get(name), rows) for name, value in batch.tensors.items()
        }
        if self._transformation is not None:
            columns = self._transformation(dict(columns))
            _check_rows(columns, rows)
            # Without them the loss would be computed of other values, and nobody would notice.
            missing = [name for name in self._needed if name not in columns]
            if missing:
                raise DataError(
                    f"transformation_fn returned no {' and no '.join(missing)}, but {', '.join(columns) or 'nothing'}; "
                    "begin with {**columns} to keep what it does not change"
                )
        return columns


def _check_rows(columns: Any, rows: int) -> None:
    if not isinstance(columns, Mapping):
        raise DataError(f"transformation_fn must return columns by name, not {type(columns).__name__}")
    for name, value in columns.items():
        have = len(value) if hasattr(value, "__len__") else None
        if have != rows:
            raise DataError(
                f"transformation_fn was given {rows} rows and returned {'no' if have is None else have} rows for "
                f"{name}; rows must stay as they are, because the weight of a batch follows from their number"
            )


def reshaped(value: Any, shape: Sequence[int] | None, rows: int) -> Any:
    """Return an array with rows of this shape. Lists (values of variable length) and shape None change nothing."""
    return value.reshape(rows, *shape) if shape is not None and isinstance(value, np.ndarray) else value


def ragged_column_error(name: str, value: Any) -> DataError:
    return DataError(
        f"{name} holds {type(value).__name__} values of variable length, which no model can take; make arrays of them "
        "in transformation_fn"
    )


def split_evenly(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return (start, stop) of at most `parts` non-empty parts of about equal size."""
    count = min(parts, rows)
    edges = [rows * part // count for part in range(count + 1)]
    return list(itertools.pairwise(edges))

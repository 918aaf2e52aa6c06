"""The code of `transform` and `predict`: Arrow batches to model inputs, through the model, to `added_columns`."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from spark_elastic.collective.gpu.leases import lease_gpu, visible_gpus
from spark_elastic.data import travel
from spark_elastic.data.arrow_values import RowsRefused, error_of, filled, missing_rows
from spark_elastic.data.columns import Request, Tensor
from spark_elastic.data.encode import Encoder
from spark_elastic.data.manifest import Kind, TensorField
from spark_elastic.data.shards import Blob
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.added_columns import AddedColumn, Array, arrow_array
from spark_elastic.spark.executor_process import accelerators_in_task

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("spark_elastic.ml")

HANDLE_INVALID = "handle_invalid='skip' leaves such rows out of the result, 'keep' gives them null predictions"
_VARIABLE = (Kind.BYTES, Kind.ARRAY, Kind.STRING)
ROWS = 4096  # rows of a batch, unless transform_batch_size or the predictor says otherwise
BATCH_BYTES = 64 << 20  # most bytes of a batch's inputs, unless transform_batch_size gives its rows
_ROWS_AT_ONCE = 10_000  # that `predict` makes model inputs of, as many as Spark sends in a batch
MAX_LOADED_MODELS = 2  # models that a Python worker keeps loaded: the present one, and the one before it


def tensors_for(
    schema: Any,
    inputs: Sequence[TensorField],
    pad_to: Mapping[str, int],
    allow_nan: bool | Sequence[str] = False,
    case_sensitive: bool = False,
) -> tuple[Tensor, ...]:
    """Return how columns of a DataFrame become the model's inputs; raise `DataError` if the type of one cannot.

    `pad_to` and `allow_nan` are those of the training rows, by input; `case_sensitive` is as of `find_column`.
    """
    types = {field.name: field.dataType.typeName() for field in schema.fields}
    for field in inputs:
        for name in field.columns:
            if (types[name] in ("string", "char", "varchar")) != (field.kind is Kind.STRING):
                was = "text" if field.kind is Kind.STRING else f"values of {field.dtype}"
                raise DataError(
                    f"column {name!r} is of type {types[name]}, and the model was trained on {was}; cast it",
                    column=name,
                )
    request = Request(
        tensors={
            each.name: list(each.columns) if each.kind is Kind.DENSE and each.shape != () else each.columns[0]
            for each in inputs
        },
        dtypes={field.name: field.dtype for field in inputs if field.kind not in (Kind.BYTES, Kind.STRING)},
        shapes={field.name: field.shape for field in inputs if field.kind not in _VARIABLE and field.shape},
        pad_to={name: length for name, length in pad_to.items() if name in {field.name for field in inputs}},
        variable=tuple(field.name for field in inputs if field.kind in (Kind.BYTES, Kind.ARRAY)),
        sparse={field.name: False for field in inputs if types[field.columns[0]] == "vectorudt"},
        allow_nan=allow_nan if isinstance(allow_nan, bool) else [f.name for f in inputs if f.name in allow_nan],
    )
    return request.resolve(schema, case_sensitive)


class FeatureReader:
    """Makes model inputs of the Arrow batches of one partition, with the encoder that wrote the training rows."""

    def __init__(self, tensors: tuple[Tensor, ...], fill: float | None = None) -> None:
        self._fill = fill  # takes the place of missing values
        self._names = list(dict.fromkeys(column.name for tensor in tensors for column in tensor.columns))
        self._no_nan = {column.name for tensor in tensors if not tensor.allow_nan for column in tensor.columns}
        self._encoder = Encoder(tensors)

    def __call__(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """Return, by name, an array [rows, ...] or a list with an entry per row. Valid until the next call.

        There must be a row. Raises DataError if a column has nulls, or other lengths than in training.
        """
        import pyarrow as pa

        columns = [self._column(batch, name) for name in self._names]
        try:
            block = self._encoder.encode(pa.RecordBatch.from_arrays(columns, self._names))
        except RowsRefused as refused:
            faults = [  # settings about writing rows do not help in `transform`
                replace(
                    each, remedy=HANDLE_INVALID if each.missing else "" if each.setting else each.remedy, setting=""
                )
                for each in refused.faults
            ]
            raise error_of(faults, self._encoder.rows) from None
        assert self._encoder.layout is not None
        return {
            field.name: np.ascontiguousarray(block.records[field.name])
            if field.kind is Kind.DENSE
            else _values(block.blobs[field.name], field)
            for field in self._encoder.layout.fields
        }

    def missing(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Return which rows have a null, or NaN or infinity where the model was not trained on them."""
        found = np.zeros(batch.num_rows, bool)
        for name in self._names:
            found |= missing_rows(self._column(batch, name), allow_nan=name not in self._no_nan)
        return found

    def _column(self, batch: pa.RecordBatch, name: str) -> Any:
        # Not by name: other columns of the batch may have equal names.
        found = _plain(batch.column(batch.schema.get_field_index(name)))
        return found if self._fill is None else filled(found, self._fill, allow_nan=name not in self._no_nan)


def _plain(column: Any) -> Any:
    """Cast decimals to doubles. When rows are written, Spark does this before encoding."""
    import pyarrow as pa

    kind, depth = column.type, 0
    while pa.types.is_list(kind):
        kind, depth = kind.value_type, depth + 1
    if not pa.types.is_decimal(kind):
        return column
    kind = pa.float64()
    for _ in range(depth):
        kind = pa.list_(kind)
    return column.cast(kind)


def _values(blob: Blob, field: TensorField) -> list[Any]:
    ends = np.cumsum(blob.lengths)
    values = [blob.data[end - length : end] for end, length in zip(ends, blob.lengths, strict=True)]
    if field.kind is Kind.ARRAY:
        return [value.view(field.dtype) for value in values]
    return [bytes(value).decode() if field.kind is Kind.STRING else bytes(value) for value in values]


class Predictor(Protocol):
    """A loaded model: a function of inputs by name, [rows, ...], that returns all outputs, tensors as arrays.

    It raises MemoryError if its device has too little memory for the rows.
    """

    rows: int  # of a batch

    def __call__(self, inputs: Mapping[str, Any], /) -> list[Any]: ...


@dataclass(frozen=True)
class Serving:
    """The functions that Spark runs in one `transform`, either of two.

    `as_lists` is an Arrow UDF: only the features go to Python, and only what is added comes back. Calling the object
    is the function of `mapInArrow`, for versions of Spark without such UDFs: all columns go both ways.
    """

    key: str  # key of the model in the cache of a Python worker
    model: Any  # Spark broadcast, or its equal on Spark Connect, of a pickled function that returns a `Predictor`
    inputs: tuple[Tensor, ...]
    added: tuple[AddedColumn, ...]
    batch_size: int | None = None  # None: the predictor's, with at most `BATCH_BYTES`
    on_gpu: bool = False  # the model is loaded once for each GPU that a task has been given
    inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    names: tuple[str, ...] = ()  # real names of the columns in their order, if the batches of `mapInArrow` have others
    groups: travel.Groups = ()  # the features as the UDF receives them; several may travel as one column
    handle_invalid: str = "error"
    output_positions: tuple[int, ...] = ()  # positions of the outputs that have a value for each row; empty if all have
    loaded: Predictor | None = None  # the model, if this process has it; `model` is not read then
    missing: float | None = None  # a number that takes the place of missing values

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        read = FeatureReader(self.inputs, self.missing)
        for plain in batches:
            batch = pa.RecordBatch.from_arrays(plain.columns, self.names or plain.schema.names)
            arrays, kept = self.added_to(batch, read)
            if not kept.all():
                plain = plain.filter(pa.array(kept))
            fields = [pa.field(c.name, a.type, nullable=self.keeps) for c, a in zip(self.added, arrays, strict=True)]
            yield pa.RecordBatch.from_arrays([*plain.columns, *arrays], schema=pa.schema([*plain.schema, *fields]))

    def as_lists(self, batches: Iterable[Any]) -> Iterator[pa.Array]:
        """Return the added columns of one partition: for each row a list with one struct of them, or none if left out.

        Each batch has the columns in the order of `groups`: a tuple of arrays, or the array if it is one.
        """
        import pyarrow as pa

        read = FeatureReader(self.inputs, self.missing)
        for given in batches:
            columns = list(given) if isinstance(given, tuple) else [given]
            names = [str(number) for number in range(len(columns))]
            batch = travel.arrived(pa.RecordBatch.from_arrays(columns, names), self.groups)
            arrays, kept = self.added_to(batch, read)
            fields = [pa.field(str(n), each.type, nullable=self.keeps) for n, each in enumerate(arrays)]
            structs = pa.StructArray.from_arrays(arrays, fields=fields)
            offsets = pa.array(np.concatenate([[0], np.cumsum(kept)]), pa.int32())
            element = pa.field("element", structs.type, nullable=False)
            yield pa.ListArray.from_arrays(offsets, structs, type=pa.list_(element))

    def in_this_process(self, rows: pa.RecordBatch) -> tuple[list[pa.Array], npt.NDArray[np.bool_]]:
        """Return the added columns of the rows that stay, and which rows these are."""
        import pyarrow as pa

        read = FeatureReader(self.inputs, self.missing)
        starts = range(0, max(rows.num_rows, 1), _ROWS_AT_ONCE)
        made = [self.added_to(rows.slice(start, _ROWS_AT_ONCE), read) for start in starts]
        columns = [pa.concat_arrays(parts) for parts in zip(*(arrays for arrays, _ in made), strict=True)]
        return columns, np.concatenate([kept for _, kept in made])

    @property
    def keeps(self) -> bool:
        """True if rows without a prediction stay, with nulls in the added columns."""
        return self.handle_invalid == "keep"

    @property
    def _cache_key(self) -> str:
        return " ".join([self.key, *accelerators_in_task()]) if self.on_gpu else self.key

    def added_to(self, batch: pa.RecordBatch, read: FeatureReader) -> tuple[list[pa.Array], npt.NDArray[np.bool_]]:
        """Return the added columns of the rows of a batch that stay, and which rows these are."""
        import pyarrow as pa

        rows = batch.num_rows
        valid = np.arange(rows)
        if self.handle_invalid != "error" and rows:
            valid = np.flatnonzero(~read.missing(batch))
        given = batch if len(valid) == rows else batch.take(pa.array(valid))
        if len(valid):
            parts, undecided = self._values(
                self.loaded or _loaded(self._cache_key, self.model), read(given), len(valid)
            )
            if undecided.any():
                if self.handle_invalid == "error":
                    wrong = int(undecided.sum())
                    raise DataError(
                        f"the model's first output is NaN for {wrong} of {len(undecided)} rows whose features are "
                        "numbers, so they have no prediction. Look at the model's weights and at rows of unusual size. "
                        f"{HANDLE_INVALID}",
                        rows=wrong,
                    )
                valid = valid[~undecided]
        else:
            parts = [[np.empty((0, *column.shape.shape), column.shape.dtype)] for column in self.added]
        arrays = [_joined(column, each) for column, each in zip(self.added, parts, strict=True)]
        kept = np.ones(rows, bool)
        if len(valid) < rows and self.keeps:
            positions = np.full(rows, -1)
            positions[valid] = np.arange(len(valid))
            taken = pa.array(positions, mask=positions < 0)
            arrays = [each.take(taken) for each in arrays]
        elif len(valid) < rows:
            kept[:] = False
            kept[valid] = True
        return arrays, kept

    def _values(
        self, predict: Predictor, features: dict[str, Any], rows: int
    ) -> tuple[list[list[Array]], npt.NDArray[np.bool_]]:
        """Return the values of each column and part of a batch, and which rows are left out: without a prediction."""
        parts: list[list[Array]] = []
        undecided = []
        start, size = 0, min(self.batch_size or _rows_of(features, rows, predict), _fitting.get(self.key, rows))
        while start < rows:
            count = min(size, rows - start)
            inputs = {name: value[start : start + count] for name, value in features.items()}
            if self.inference_fn is not None:
                inputs = dict(self.inference_fn(inputs))
            try:
                returned = predict(inputs)
            except MemoryError as error:
                if count == 1:
                    raise InvalidSettingsError(
                        f"transform_device has too little memory for the model and one row: {error}. Let fewer tasks "
                        "share a GPU (spark.task.resource.gpu.amount), or set transform_device='cpu'"
                    ) from error
                size = _fitting[self.key] = count // 2
                log.info("too little memory for %d rows; trying %d: %s", count, size, error)
                continue
            start += count
            outputs = [returned[at] for at in self.output_positions] if self.output_positions else returned
            for index, output in enumerate(outputs):
                if not has_rows(output, count):
                    raise DataError(
                        f"output {index} of the model has shape {list(np.shape(output))} for {count} rows; the first "
                        "axis of each output must be the rows"
                    )
            wrong: npt.NDArray[np.bool_] = np.zeros(count, bool)
            if outputs[0].dtype.kind == "f" and any(c.made != "raw" and c.rule != "value" for c in self.added):
                unknown = np.isnan(outputs[0])
                if unknown.any():
                    wrong = unknown.reshape(count, -1).any(axis=1)  # no prediction, not a class
            parts.append([each[~wrong] for each in outputs] if wrong.any() else outputs)
            undecided.append(wrong)
        firsts = [outputs[0] for outputs in parts]
        if len({each.shape[1:] for each in firsts}) == 1:  # numpy's calls cost more than the few rows of a part
            firsts = [np.concatenate(firsts)]
        values = [
            [column.values(each) for each in (parts if column.made == "raw" else ([first] for first in firsts))]
            for column in self.added
        ]
        return values, np.concatenate(undecided)


def gpu_of_task(count: int) -> tuple[int, str]:
    """Return which of the `count` GPUs that this process sees a Spark task has been given; without one, lease one."""
    names = visible_gpus(count)
    given = [names.index(address) for address in accelerators_in_task() if address in names]
    return (given[0], "given to the task") if given else lease_gpu(count, 0)


def has_rows(output: Any, rows: int) -> bool:
    """Return whether what a model returned is an array with a value for each row, which a column can hold."""
    return isinstance(output, np.ndarray) and output.shape[:1] == (rows,) and output.dtype.kind != "c"


def _joined(column: AddedColumn, parts: Sequence[Array]) -> pa.Array:
    """Return a column's values of all parts, whose rows may have arrays of another length in each of them."""
    import pyarrow as pa

    if len({each.shape[1:] for each in parts}) > 1:
        return pa.concat_arrays([arrow_array(column, each) for each in parts])
    return arrow_array(column, np.concatenate(parts) if len(parts) > 1 else parts[0])


def _rows_of(features: Mapping[str, Any], rows: int, predict: Predictor) -> int:
    """Return the rows of a batch: the predictor's, or as many as `BATCH_BYTES` hold."""
    total = sum(value.nbytes for value in features.values() if isinstance(value, np.ndarray))
    return max(1, min(predict.rows, BATCH_BYTES * rows // max(1, total)))


_fitting: dict[str, int] = {}
"""The most rows of a batch, by key of the model, after a larger one did not fit its device's memory."""
_lock = threading.Lock()
_models: OrderedDict[str, Predictor] = OrderedDict()


def _loaded(key: str, broadcast: Any) -> Predictor:
    with _lock:
        if key not in _models:
            import cloudpickle

            _models[key] = cloudpickle.loads(broadcast.value)()
            while len(_models) > MAX_LOADED_MODELS:
                _models.popitem(last=False)
        _models.move_to_end(key)
        return _models[key]

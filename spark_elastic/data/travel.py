"""The way of columns from Spark to Python: scalar columns of one type travel as one column of arrays.

Spark's JVM writes an Arrow batch row by row and value by value, and each column that it changes to costs it more than
the value. 20 columns of floats take a third of the time as one column of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

#: The columns that travel together, by their names. A group of one is that column itself, any other an array.
Groups = tuple[tuple[str, ...], ...]

_JOINED = frozenset({"byte", "short", "integer", "long", "float", "double"})
_FEWEST_JOINED = 4  # the fewest columns of a group: an array is more work than a value
_MOST_JOINED = 1000  # the most columns of a group, which are one expression of Spark


def groups_of(types: Mapping[str, str]) -> Groups:
    """Divide columns, given with Spark's names of their types, into groups that can travel together."""
    joined = {kind: [name for name, other in types.items() if other == kind] for kind in _JOINED & {*types.values()}}
    parts = [
        tuple(names[start : start + _MOST_JOINED])
        for names in joined.values()
        if len(names) >= _FEWEST_JOINED
        for start in range(0, len(names), _MOST_JOINED)
    ]
    together = {name for names in parts for name in names}
    return (*sorted(parts), *((name,) for name in types if name not in together))


def expressions(groups: Groups, column: Callable[[str], Any], array: Callable[..., Any]) -> list[Any]:
    """Return Spark's expression of each group; `array` is the SQL function of that name."""
    return [column(names[0]) if len(names) == 1 else array(*map(column, names)) for names in groups]


def arrived(batch: pa.RecordBatch, groups: Groups) -> pa.RecordBatch:
    """Return the columns of all groups, one by one and with their names, of a batch with a column for each group."""
    import pyarrow as pa

    arrays: list[pa.Array] = []
    for names, column in zip(groups, batch.columns, strict=True):
        arrays += [column] if len(names) == 1 else _divided(column, len(names))
    return pa.RecordBatch.from_arrays(arrays, [name for names in groups for name in names])


def _divided(column: pa.Array, width: int) -> Sequence[pa.Array]:
    """Return the columns that were joined to a column of arrays, none of which is null."""
    import pyarrow as pa
    from pyarrow import compute

    values = column.flatten()
    missing: list[Any] = [None] * width
    if values.null_count:
        missing = list(np.ascontiguousarray(values.is_null().to_numpy(zero_copy_only=False).reshape(-1, width).T))
        values = compute.fill_null(values, 0)
    columns = np.ascontiguousarray(values.to_numpy().reshape(-1, width).T)
    # with from_pandas, the default if there is a mask, NaN would become null too
    return [pa.array(each, mask=mask, from_pandas=False) for each, mask in zip(columns, missing, strict=True)]

"""A model's weights without the model, and back into one of the same architecture."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import CheckpointError
from spark_elastic.keras.variables import same_path

# Arrays in a file that can be read without running code, with the types that numpy does not know by itself.

Array = npt.NDArray[Any]

_TYPES = "types.json"


def dump_arrays(arrays: Mapping[str, Array]) -> bytes:
    """An .npz file. What numpy has no name for (bfloat16, small floats) is in it as bytes, and its type beside it."""
    out, types, plain = io.BytesIO(), {}, {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.kind == "V":
            types[name] = [array.dtype.name, list(array.shape)]
            array = np.frombuffer(array.tobytes(), np.uint8)
        plain[name] = array
    np.savez(out, **{_TYPES: np.frombuffer(json.dumps(types).encode(), np.uint8)}, **plain)  # type: ignore[arg-type]
    return out.getvalue()


def load_arrays(data: bytes) -> dict[str, Array]:
    """Raises: CheckpointError: damaged, or not a file of `dumps`."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        types = json.loads(arrays.pop(_TYPES).tobytes())
        for name, (kind, shape) in types.items():
            arrays[name] = arrays[name].view(_type(kind)).reshape(shape)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"not a file of arrays: {error}") from error
    return arrays


def _type(name: str) -> np.dtype[Any]:
    import ml_dtypes  # comes with TensorFlow

    kind: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return kind


def dumps(model: Any) -> bytes:
    """All weights of the model, also those that are not trained."""
    return dump_arrays(named(model.weights))


def fill(model: Any, file: bytes) -> Any:
    """Give a built model the weights that `dumps` has written, and return it.

    Raises: CheckpointError: damaged, or of another architecture.
    """
    try:
        assign(model.weights, load_arrays(file))
    except ValueError as error:
        raise CheckpointError(f"the saved weights do not fit {model.name}: {error}") from error
    return model


def named(variables: Sequence[Any], prefix: str = "") -> dict[str, Array]:
    """The values by number and path; paths alone need not differ. Copies, which later steps do not reach."""
    return {f"{prefix}{number}:{each.path}": each.numpy() for number, each in enumerate(variables)}


def assign(variables: Sequence[Any], values: Mapping[str, Array], prefix: str = "") -> None:
    """Take over what `named` has made, all of it or nothing.

    Raises: ValueError: they are other variables.
    """
    found = {
        int(number): (path, value)
        for name, value in values.items()
        if name.startswith(prefix)
        for number, _, path in [name[len(prefix) :].partition(":")]
        if number.isdigit()
    }
    if len(found) != len(variables):
        raise ValueError(f"there are {len(found)} arrays for {len(variables)} variables")
    for number, variable in enumerate(variables):
        path, value = found.get(number, ("nothing", None))
        if value is None or tuple(value.shape) != tuple(variable.shape) or not _same(path, variable.path):
            have = "" if value is None else f" {list(value.shape)}"
            raise ValueError(f"{path}{have} is not {variable.path} {list(variable.shape)}")
    for number, variable in enumerate(variables):
        variable.assign(found[number][1])


def _same(one: str, other: str) -> bool:
    """Whether two paths can be those of one variable: what its model is called need not be the same."""
    return same_path(one.rpartition("/")[2], other.rpartition("/")[2])

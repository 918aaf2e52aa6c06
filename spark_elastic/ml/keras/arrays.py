"""Arrays in a file that can be read without running code, with the types that numpy does not know by itself."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import CheckpointError

Array = npt.NDArray[Any]

_TYPES = "types.json"


def dumps(arrays: Mapping[str, Array]) -> bytes:
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


def loads(data: bytes) -> dict[str, Array]:
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

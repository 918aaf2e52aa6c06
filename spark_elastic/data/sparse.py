"""Sparse rows as the sidecar holds them: for each row its int32 indices, then as many values."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.shards import Blob, spans


def encode_rows(counts: npt.NDArray[Any], indices: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> Blob:
    """The blob of some rows.

    counts: how many values each row has, shape (rows,). indices, values: those of all rows end to end, one axis each;
    values are of 4 or 8 bytes.
    """
    counts = counts.astype(np.int64)
    words = values.dtype.itemsize // 4  # everything is scattered as words of 4 bytes
    lengths = counts * (1 + words)
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.int32)
    out[spans(starts, counts)] = indices
    out[spans(starts + counts, counts * words)] = np.ascontiguousarray(values).view(np.int32)
    return Blob(out.view(np.uint8), lengths * 4)

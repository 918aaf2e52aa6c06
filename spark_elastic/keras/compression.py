"""Compression of what a `DistributedOptimizer` sends, as the backend's tensors need it."""

from __future__ import annotations

from typing import Any

from spark_elastic.keras.backend import BACKEND

if BACKEND == "tensorflow":
    from spark_elastic.tensorflow.compression import Compression as _Compression
else:
    from spark_elastic.collective.compression import Compression as _Compression  # type: ignore[assignment]

Compression: Any = _Compression

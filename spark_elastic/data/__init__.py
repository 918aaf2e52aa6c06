"""DataFrames as packed records on shared storage, and batches from them at memory speed.

`materialize` writes a DataFrame, `pack` arrays; `Dataset` opens what was written; `BatchReader` reads it, and
`TorchBatches` makes a torch dataset of that; `clear_cache` removes the sets of a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_elastic.data.batch import Batch
    from spark_elastic.data.catalog import clear_cache
    from spark_elastic.data.dataset import Dataset
    from spark_elastic.data.materialization import materialize
    from spark_elastic.data.packing import pack
    from spark_elastic.data.read_order import resolve_order
    from spark_elastic.data.reader import BatchReader
    from spark_elastic.data.store import Store
    from spark_elastic.data.torch_dataset import TorchBatches

# Resolved on first use: a writer task needs no reader, and not everybody torch.
_HOMES = {
    "Batch": "batch",
    "BatchReader": "reader",
    "Dataset": "dataset",
    "Store": "store",
    "TorchBatches": "torch_dataset",
    "clear_cache": "cache",
    "materialize": "materialization",
    "pack": "packing",
    "resolve_order": "read_order",
}

__all__ = [
    "Batch",
    "BatchReader",
    "Dataset",
    "Store",
    "TorchBatches",
    "clear_cache",
    "materialize",
    "pack",
    "resolve_order",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

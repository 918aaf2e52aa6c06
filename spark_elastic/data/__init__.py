"""DataFrames as packed records on shared storage, and batches of them at memory speed.

`materialize` writes a DataFrame and `pack` writes arrays; `Dataset` opens what they wrote, `BatchReader` reads batches
of it, and `TorchBatches` is a torch dataset of these. `clear_cache` deletes the datasets of a store.

Start reading with `materialization` for writing, `reader` for reading, and `manifest` for the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_elastic.data.catalog import clear_cache
    from spark_elastic.data.dataset import Dataset, pack
    from spark_elastic.data.materialization import materialize
    from spark_elastic.data.reader import Batch, BatchReader, resolve_order
    from spark_elastic.data.store import Store
    from spark_elastic.data.torch_dataset import TorchBatches

# Imported on first use: tasks that write need no reader, and most programs need no torch.
_MODULES = {
    "Batch": "reader",
    "BatchReader": "reader",
    "Dataset": "dataset",
    "Store": "store",
    "TorchBatches": "torch_dataset",
    "clear_cache": "catalog",
    "materialize": "materialization",
    "pack": "dataset",
    "resolve_order": "reader",
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
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value

"""Objects in a file that can be loaded without running code that the file names.

PyTorch's own restricted loader (`weights_only=True`) is told to accept the classes of `torch.nn`, `torch.optim` and the
callbacks of this package beside tensors; what consists of these alone needs no trust in where the file comes from.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import io
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from spark_elastic.errors import CheckpointError
from spark_elastic.ml import trust

SUFFIX = "pt"
_CLASSES_OF = ("torch.nn.modules.", "torch.optim.", "spark_elastic.ml.callbacks")
_FUNCTIONS_OF = ("torch.nn.functional",)
_PLAIN = {
    ("__builtin__", "dict"): builtins.dict,
    ("builtins", "dict"): builtins.dict,
    ("collections", "defaultdict"): collections.defaultdict,
}


def dumps(value: Any) -> bytes | None:
    """The value as a file that `loads` accepts; None if it consists of more than that."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        loads(file.getvalue())
    except Exception:  # whatever cannot be pickled, or not be loaded again, is for others to deal with
        return None
    return file.getvalue()


def loads(file: bytes) -> Any:
    """What `dumps` was given.

    Raises: CheckpointError: the file is damaged, names something that is not accepted, or this version of torch could
        be made to run code.
    """
    trust.TORCH.check(torch.__version__)
    try:
        needed = [_accepted(module, name) for module, name in _names_in(file)]
    except (zipfile.BadZipFile, KeyError, StopIteration) as error:
        raise CheckpointError(f"not a file of torch.save: {error}") from None
    try:
        with torch.serialization.safe_globals([each for each in needed if each is not None]):
            return torch.load(io.BytesIO(file), weights_only=True, map_location="cpu")
    except CheckpointError:
        raise
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot be loaded without trust, by torch {torch.__version__}: {why}") from error


def pickled(value: Any) -> bytes:
    """What needs trust, for `pickle.loads`."""
    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


def _names_in(file: bytes) -> Iterator[tuple[str, str]]:
    """(module, name) of all that the pickle within the file refers to."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            yield module, name


def _accepted(module: str, name: str) -> Any:
    """The object if it is on our list; None if it is for torch's own list to decide."""
    if (module, name) in _PLAIN:
        return _PLAIN[module, name]
    if not f"{module}.".startswith((*_CLASSES_OF, *_FUNCTIONS_OF)):
        return None
    found = getattr(importlib.import_module(module), name, None)
    home = f"{getattr(found, '__module__', '')}."
    if isinstance(found, type) and home.startswith(_CLASSES_OF):
        return found
    return found if callable(found) and module in _FUNCTIONS_OF and home.startswith(_FUNCTIONS_OF) else None

"""Look into the files of saved Keras models before Keras opens them, because versions of it read any file they name."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras

from spark_elastic.errors import CheckpointError

_CONFIG, _WEIGHTS = "config.json", "model.weights"
_HDF5 = (".h5", ".hdf5")


def archive_config(file: bytes) -> Any:
    """Return the configuration in an archive; raise CheckpointError if it is damaged, or not an archive of Keras."""
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"{damaged} is damaged")
            if not any(name.startswith(_WEIGHTS) for name in archive.namelist()):
                raise KeyError(f"there is no {_WEIGHTS} in it")
            return json.loads(archive.read(_CONFIG))
    except Exception as error:  # zipfile and zlib raise errors of many classes at damaged bytes
        raise CheckpointError(f"not a .keras archive: {type(error).__name__}: {error}") from error


def check_self_contained(file: bytes, own: Mapping[str, Any], *, safe: bool = True) -> None:
    """Raise CheckpointError if an archive is damaged, or would get the content of other files into the model."""
    check_names_no_files(archive_config(file), own, safe=safe)
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith(_HDF5):
                _check_hdf5(io.BytesIO(archive.read(entry)), entry.filename)


def check_saved(path: str | os.PathLike[str], own: Mapping[str, Any]) -> None:
    """Raise CheckpointError as `check_self_contained` does, for a file or folder of a model on this machine."""
    saved = Path(path)
    if saved.is_dir():
        if (saved / _CONFIG).exists():
            check_names_no_files(_parsed((saved / _CONFIG).read_bytes(), _CONFIG), own)
        for each in saved.rglob("*"):
            if each.suffix in _HDF5:
                _check_hdf5(each, each.name)
    elif saved.suffix in _HDF5 and saved.exists():
        check_names_no_files(_parsed(_check_hdf5(saved, saved.name) or "null", saved.name), own)
    elif saved.exists():
        check_self_contained(saved.read_bytes(), own)


def _parsed(config: str | bytes, name: str) -> Any:
    try:
        return json.loads(config)
    except ValueError as error:
        raise CheckpointError(f"{name} has no configuration of a model: {error}") from error


def check_names_no_files(config: Any, own: Mapping[str, Any] = MappingProxyType({}), *, safe: bool = True) -> None:
    """Raise CheckpointError if a layer in a configuration would read a file; Keras itself writes no such configuration.

    Arguments of the user's `own` classes may have any meaning. `safe` refuses a TFSMLayer, a folder with a program.
    """
    stack = [config]
    while stack:
        node = stack.pop()
        if isinstance(node, (list, tuple)):
            stack += node
        elif isinstance(node, Mapping):
            stack += node.values()
            kind = str(node.get("registered_name") or node.get("class_name"))
            given = node.get("config")
            if not isinstance(given, Mapping) or kind in own or keras.saving.get_registered_object(kind) is not None:
                continue
            for name in ("vocabulary", "idf_weights", *(["filepath"] if safe else [])):
                if isinstance(given.get(name), str):
                    raise CheckpointError(f"{kind} in the model names the file {given[name]!r:.200} ({name}): refused")


def _check_hdf5(file: Any, name: str) -> Any:
    """Return the configuration in an HDF5 file of a model, or None; raise CheckpointError for links and such."""
    import h5py  # installed with Keras

    try:
        with h5py.File(file, "r") as opened:
            stack, seen = [opened["/"]], set()
            while stack:
                group = stack.pop()
                if (address := h5py.h5o.get_info(group.id).addr) in seen:
                    continue
                seen.add(address)
                for child in group:
                    link = group.get(child, getlink=True)
                    if not isinstance(link, h5py.HardLink):
                        raise CheckpointError(
                            f"{name} has a {type(link).__name__} at {group.name}/{child!s:.80}: refused"
                        )
                    value = group[child]
                    if isinstance(value, h5py.Group):
                        stack.append(value)
                    elif isinstance(value, h5py.Dataset) and (value.external or value.is_virtual):
                        kind = "virtual" if value.is_virtual else "external"
                        raise CheckpointError(f"{name} has {kind} storage at {value.name:.80}: refused")
            return opened.attrs.get("model_config")
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises errors of many classes at damaged bytes
        raise CheckpointError(f"{name} is not a file of weights: {error}") from error

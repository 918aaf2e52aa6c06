"""Saving and loading estimators and models as Spark ML does, below a path of Spark's filesystem.

::

    path/metadata/      what Spark ML writes for every stage: class, uid and the settings that JSON can hold
    path/data/*         the other settings, the weights, ...

What JSON cannot hold is stored in one of two ways, and the metadata says which for each setting:

"safe"    a file that the framework's restricted loader reads: layers, optimizers, losses of the framework itself
"pickled" anything else: a class or function of your own. Loading it runs code that the file names, so it is loaded only
          where the caller says that the file is to be trusted: `load(path, trusted=True)`, or within
          `with trusted_files():` for what loads several stages at once (PipelineModel.load), or where the deployment
          does, see `trust`. Saving says so.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import posixpath
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.trust import TRUST, TRUST_VARIABLE, granted, is_trusted, trusted_files

log = logging.getLogger("spark_elastic.ml")

FORMAT = 1
_DATA = "data"
_SECRETS = ("storage_options",)
"""Settings that may hold credentials, which do not belong into files."""
_PLACES = ("store",)
"""Settings that name a place, and are found again by what it is called."""

T = TypeVar("T", bound="Savable")


class Codec(Protocol):
    """How a framework stores objects."""

    SUFFIX: str
    """Of the files that can be loaded without trust."""

    def dumps(self, value: Any) -> bytes | None:
        """None: the value is more than that."""
        ...

    def loads(self, file: bytes) -> Any:
        """Raises: CheckpointError: damaged, or not to be loaded without trust."""
        ...

    def pickled(self, value: Any) -> bytes:
        """For `pickle.loads`: what needs trust."""
        ...


class Savable(MLWritable, MLReadable[Any]):
    """Mixed into Params that are saved in this way."""

    TOGETHER: tuple[str, ...] = ()
    """Settings that refer to one another and so lie in one file: an optimizer and the model whose parameters it has."""

    @classmethod
    def _codec(cls) -> Codec:
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        """What is saved beside settings, as JSON can hold it."""
        return {}

    def _files(self) -> dict[str, bytes]:
        """What is saved beside settings, as files."""
        return {}

    def _objects(self) -> dict[str, Any]:
        """What is saved beside settings, as objects that need the framework's loader or a pickle."""
        return {}

    def _running(self) -> list[str]:
        """What in the files of `_files` is code that loading them runs."""
        return []

    @classmethod
    def _at_hand(cls, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Of what `_objects` gave: what this process has, so that the files need not be looked at for it."""
        return {}

    def _restore(self, facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> None:
        """Called by the loader with what the three above gave, after the settings have been set."""

    def write(self) -> ElasticWriter:
        return ElasticWriter(self)

    @classmethod
    def read(cls: type[T]) -> ElasticReader[T]:
        return ElasticReader(cls)

    @classmethod
    def load(cls: type[T], path: str, *, trusted: bool = False) -> T:
        """Load what was saved at `path`.

        trusted: whether code that the files name may be run; needed only if they hold classes or functions that are
            not the framework's own, which the error says.
        Raises: CheckpointError: nothing of this kind is there, it is damaged, or it needs trust.
        """
        return cls.read().trusted(trusted).load(path)


class ElasticWriter(MLWriter):
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        """Raises: CheckpointError: there is something at `path` already, and `overwrite` was not asked for."""
        target = _Folder(self.sparkSession, path)
        if target.exists():
            raise CheckpointError(f"{path} exists; save to another path, or use .write().overwrite().save(path)")
        plain, objects = plain_and_objects(self.instance)
        beside = self.instance._objects()
        objects.update(beside)
        stored, files = _encode(objects, self.instance.TOGETHER, self.instance._codec())
        warn_of_trust(self.instance, stored, path)
        files.update(self.instance._files())
        target.write(_DATA, files)
        about = {
            "format": FORMAT,
            "stored": stored,
            "objects": sorted(beside),
            "files": sorted(files),
            "facts": self.instance._facts(),
        }
        # Last, because it is what makes the rest a saved stage.
        DefaultParamsWriter.saveMetadata(
            self.instance, path, self.sc, extraMetadata={"sparkElastic": about}, paramMap=plain
        )


class ElasticReader(MLReader[T], Generic[T]):
    def __init__(self, cls: type[T]) -> None:
        super().__init__()
        self._cls = cls
        self._trusted = False
        self._instead: dict[str, Any] = {}

    def instead(self, **objects: Any) -> ElasticReader[T]:
        """Objects to take in place of those that were saved, which are then not looked at."""
        self._instead = objects
        return self

    def trusted(self, trusted: bool = True) -> ElasticReader[T]:
        """Whether code that the files name may be run."""
        self._trusted = trusted
        return self

    def load(self, path: str) -> T:
        source = _Folder(self.sparkSession, path)
        if not source.exists():
            raise CheckpointError(f"there is nothing at {path}")
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        about = metadata.get("sparkElastic")
        wanted = f"{self._cls.__module__}.{self._cls.__name__}"
        if not isinstance(about, dict) or metadata["class"] != wanted:
            raise CheckpointError(f"at {path} lies a {metadata['class']}, not a {wanted}")
        if about["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {about['format']!r}; this version reads format {FORMAT}")
        files = source.read(_DATA, about["files"])
        trusted = self._trusted or is_trusted() or granted(path, source.qualified)
        codec = self._cls._codec()
        instead = {**self._cls._at_hand(about["facts"]), **self._instead}
        stored = {name: where for name, where in about["stored"].items() if name not in instead}
        with trusted_files(trusted):
            values = {**_decode(stored, files, codec, trusted, path), **instead}
        instance: Any = self._cls()
        instance._resetUid(metadata["uid"])
        beside = {*about["objects"], *instead}
        settings = {name: value for name, value in values.items() if name not in beside}
        for name, value in {**metadata["paramMap"], **settings}.items():
            if not instance.hasParam(name):
                raise CheckpointError(f"{path} has a setting {name!r}, which this version does not know")
            instance._set(**{name: value})
        with trusted_files(trusted):
            instance._restore(about["facts"], files, {name: values[name] for name in beside})
        return instance  # type: ignore[no-any-return]


def plain_and_objects(instance: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings that were made: those that survive JSON as they are, and the others. Neither has secrets."""
    plain: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for param, value in instance._paramMap.items():
        if param.name in _SECRETS:
            continue
        if param.name in _PLACES and isinstance(value, (os.PathLike, Store)):
            value = value.url if isinstance(value, Store) else os.fspath(value)
        (plain if _survives_json(value) else objects)[param.name] = value
    return plain, objects


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def warn_of_trust(instance: Any, stored: Mapping[str, str], path: str) -> None:
    """Say now what would be found out when it is loaded, perhaps by somebody else."""
    pickled = sorted(name for name, where in stored.items() if not where.startswith("safe:"))
    if running := [*pickled, *instance._running()]:
        log.warning(
            "loading %s from %s will need trust, because of %s: code of your own, which only a pickle can hold. Load "
            "it with load(path, trusted=True); CrossValidatorModel.load, PipelineModel.load and the like within `with "
            "spark_elastic.ml.persistence.trusted_files():`; a deployment sets %s. Classes and optimizers of the "
            "framework's own need none",
            type(instance).__name__,
            path,
            ", ".join(running),
            TRUST_VARIABLE,
        )


def _encode(
    objects: dict[str, Any], together: tuple[str, ...], codec: Codec
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Returns: name of the setting -> "safe:file" or "pickled:file"; and the files."""
    stored: dict[str, str] = {}
    files: dict[str, bytes] = {}
    # Classes and functions refer to nothing, so the rest of the group may be safe where they are not.
    joined = [
        n for n in together if n in objects and not (isinstance(objects[n], type) or inspect.isroutine(objects[n]))
    ]
    for group in [*([joined] if joined else []), *([name] for name in objects if name not in joined)]:
        values = {name: objects[name] for name in group}
        file, how = codec.dumps(values), "safe"
        if file is None:
            try:
                file, how = codec.pickled(values), "pickled"
            except Exception as error:
                raise InvalidSettingsError(f"{', '.join(group)} cannot be saved: {error}") from error
        name = f"{'-'.join(group)}.{codec.SUFFIX if how == 'safe' else 'pkl'}"
        files[name] = file
        stored.update(dict.fromkeys(group, f"{how}:{name}"))
    return stored, files


def _decode(
    stored: Mapping[str, str], files: Mapping[str, bytes], codec: Codec, trusted: bool, path: str
) -> dict[str, Any]:
    import cloudpickle

    pickled = sorted(name for name, where in stored.items() if not where.startswith("safe:"))
    if pickled and not trusted:
        raise CheckpointError(
            f"{', '.join(pickled)} in {path} can only be loaded by running code that the file names, because it is of "
            f"your own making and not the framework's. {TRUST}"
        )
    values: dict[str, Any] = {}
    for where in sorted(set(stored.values())):
        how, _, name = where.partition(":")
        if name not in files or how not in ("safe", "pickled"):
            raise CheckpointError(f"{path} is damaged: its metadata speaks of {where!r}")
        if how == "safe":
            loaded = codec.loads(files[name])
        elif trusted:
            loaded = cloudpickle.loads(files[name])
        values.update({key: value for key, value in loaded.items() if stored.get(key) == where})
    return values


class _Folder:
    """A folder of the filesystem that Spark would use for the path. Whole files are moved, through this machine's disk.

    Spark's own access is used, not ours: a path without a scheme means the same as in the metadata beside it.
    """

    def __init__(self, spark: Any, path: str) -> None:
        self._path = path
        self._jvm = spark._jvm
        self._hadoop = self._jvm.org.apache.hadoop.fs
        self._root = self._hadoop.Path(path)
        self._configuration = spark._jsc.hadoopConfiguration()
        self._filesystem = self._root.getFileSystem(self._configuration)

    def qualified(self, path: str) -> str:
        """Return the whole URI of a path, without "..", by the default filesystem where it names none."""
        place = self._hadoop.Path(path)
        try:
            return str(place.getFileSystem(self._configuration).makeQualified(place).toString())
        except Py4JJavaError:  # of a filesystem that this Spark does not have, where nothing can be loaded from
            return path

    def exists(self) -> bool:
        return bool(self._filesystem.exists(self._root))

    def write(self, folder: str, files: Mapping[str, bytes]) -> None:
        with tempfile.TemporaryDirectory(prefix="spark_elastic-save-") as here:
            self._filesystem.mkdirs(self._at(folder))
            for name, content in files.items():
                (Path(here) / name).write_bytes(content)
                self._filesystem.copyFromLocalFile(
                    self._hadoop.Path(f"file:{here}/{name}"), self._at(posixpath.join(folder, name))
                )

    def read(self, folder: str, names: list[str]) -> dict[str, bytes]:
        """Raises: CheckpointError: one is missing, or cannot be read."""
        contents: dict[str, bytes] = {}
        with tempfile.TemporaryDirectory(prefix="spark_elastic-load-") as here:
            for name in names:
                if name != posixpath.basename(name) or name in ("", ".", ".."):
                    raise CheckpointError(f"{self._path} names a file {name!r}, which is not one of its own")
                at = self._at(posixpath.join(folder, name))
                if not self._filesystem.exists(at):
                    raise CheckpointError(f"{self._path} is incomplete: {folder}/{name} is missing")
                target = Path(here) / name
                try:
                    self._filesystem.copyToLocalFile(at, self._hadoop.Path(f"file:{target}"))
                except Py4JJavaError as error:  # its checksum, for one
                    reason = error.java_exception.toString()
                    raise CheckpointError(f"{self._path}: {folder}/{name} cannot be read: {reason}") from error
                contents[name] = target.read_bytes()
        return contents

    def _at(self, inside: str) -> Any:
        return self._hadoop.Path(posixpath.join(self._path, inside))

"""The folder that a stage is saved in: of the filesystem that Spark uses, or else of this machine's own.

Without a session, and with one of Spark Connect, Spark's filesystem is out of reach. So a path without a scheme is one
of this machine, and a URI (s3://, gs://, hdfs://) is opened from here. The files are the same in each case.
"""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError
from spark_elastic.spark.connect_session import is_connect
from spark_elastic.spark.failures import refused_call

_METADATA = "metadata"
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")  # names of files that a stage has: settings, joined with "-", and a suffix


def saved_folder(spark: Any, path: str) -> StoreFolder | SparkFolder:
    """Return the folder of a saved stage at a path, as this session sees it; as this process does if it is None."""
    if spark is None or is_connect(spark):
        return StoreFolder(spark, path)
    try:
        return SparkFolder(spark, path)
    except Exception as error:
        if refused_call(error) is None:  # of a platform that keeps Spark's filesystem to itself
            raise
        return StoreFolder(spark, path)


class _Folder(ABC):
    hint = ""  # added to the error if there is no such folder

    def __init__(self, spark: Any, path: str) -> None:
        self._spark = spark
        self._path = path

    def read(self, folder: str, names: list[str]) -> dict[str, bytes]:
        """Return the files by name. Raises `CheckpointError` if one is missing, or cannot be read."""
        contents: dict[str, bytes] = {}
        for name in names:
            if not _FILE.fullmatch(name) or name in (".", ".."):
                raise CheckpointError(f"{self._path} names a file {name!r:.80}, which is not in its folder")
            try:
                contents[name] = self._content(posixpath.join(folder, name))
            except FileNotFoundError:
                raise CheckpointError(f"{self._path} is incomplete: {folder}/{name} is missing") from None
            except OSError as error:
                raise CheckpointError(f"{self._path}: {folder}/{name} cannot be read: {error}") from error
        return contents

    @abstractmethod
    def _content(self, inside: str) -> bytes:
        """Return the content of a file in the folder. Raises OSError."""


class StoreFolder(_Folder):
    """A folder that this process opens itself, without Spark."""

    def __init__(self, spark: Any, path: str) -> None:
        super().__init__(spark, path)
        self._store = Store.create(path)
        if spark is None and self._store.is_local:
            self.hint = " on this machine"

    def qualified(self, path: str) -> str:
        """Return the full URI of a path, without ".."; on the default filesystem if it names none."""
        return Store.create(path).address

    def exists(self) -> bool:
        return self._store.exists()

    def delete(self) -> None:
        self._store.delete()

    def write_metadata(self, instance: Any, extra: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        import pyspark
        from pyspark.ml.util import DefaultParamsWriter

        version = pyspark.__version__ if self._spark is None else self._spark.version
        known: Any = SimpleNamespace(version=version)  # all that is asked of a session
        text = DefaultParamsWriter._get_metadata_to_save(instance, known, dict(extra), dict(settings))
        self._store.write_bytes(f"{_METADATA}/part-00000", text.encode() + b"\n")
        self._store.write_bytes(f"{_METADATA}/_SUCCESS", b"")

    def metadata(self) -> dict[str, Any]:
        """Return the metadata. Raises `CheckpointError` if it is no object of JSON, or an error of the storage."""
        parts = [each.path for each in self._store.list(_METADATA) if posixpath.basename(each.path).startswith("part-")]
        text = next(filter(None, (self._store.read_bytes(part).strip() for part in parts)), None)
        if text is None:
            raise CheckpointError(f"{self._path} is incomplete: it has no metadata")
        return _decoded(lambda: json.loads(text.splitlines()[0].decode()), self._path)

    def write(self, folder: str, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            self._store.write_bytes(posixpath.join(folder, name), content)

    def _content(self, inside: str) -> bytes:
        return self._store.read_bytes(inside)


def _decoded(decode: Callable[[], Any], path: str) -> dict[str, Any]:
    """Return the metadata that `decode` returns. Raise `CheckpointError` if it is no object of JSON."""
    try:
        found = decode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its metadata is not JSON: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: its metadata has no field {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: its metadata is a {type(found).__name__}, not an object")
    return found


class SparkFolder(_Folder):
    """The same in the filesystem that Spark uses for the path, by copies on this machine's disk."""

    def __init__(self, spark: Any, path: str) -> None:
        super().__init__(spark, path)
        self._jvm = spark._jvm
        self._hadoop = self._jvm.org.apache.hadoop.fs
        self._root = self._hadoop.Path(path)
        self._configuration = spark._jsc.hadoopConfiguration()
        self._filesystem = self._root.getFileSystem(self._configuration)

    def qualified(self, path: str) -> str:
        from py4j.protocol import Py4JJavaError

        target = self._hadoop.Path(path)
        try:
            return str(target.getFileSystem(self._configuration).makeQualified(target).toString())
        except Py4JJavaError:  # this Spark cannot load anything from that filesystem
            return path

    def exists(self) -> bool:
        return bool(self._filesystem.exists(self._root))

    def delete(self) -> None:
        self._filesystem.delete(self._root, True)

    def write_metadata(self, instance: Any, extra: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        from pyspark.ml.util import DefaultParamsWriter

        context = self._spark.sparkContext
        DefaultParamsWriter.saveMetadata(
            instance, self._path, context, extraMetadata=dict(extra), paramMap=dict(settings)
        )

    def metadata(self) -> dict[str, Any]:
        from pyspark.ml.util import DefaultParamsReader

        return _decoded(lambda: DefaultParamsReader.loadMetadata(self._path, self._spark.sparkContext), self._path)

    def write(self, folder: str, files: Mapping[str, bytes]) -> None:
        with tempfile.TemporaryDirectory(prefix="spark_elastic-save-") as here:
            self._filesystem.mkdirs(self._at(folder))
            for name, content in files.items():
                (Path(here) / name).write_bytes(content)
                self._filesystem.copyFromLocalFile(
                    self._hadoop.Path(f"file:{here}/{name}"), self._at(posixpath.join(folder, name))
                )

    def _content(self, inside: str) -> bytes:
        from py4j.protocol import Py4JJavaError

        if not self._filesystem.exists(self._at(inside)):
            raise FileNotFoundError(inside)
        with tempfile.TemporaryDirectory(prefix="spark_elastic-load-") as here:
            target = Path(here) / posixpath.basename(inside)
            try:
                self._filesystem.copyToLocalFile(self._at(inside), self._hadoop.Path(f"file:{target}"))
            except Py4JJavaError as error:  # a wrong checksum, for example
                raise OSError(error.java_exception.toString()) from error
            return target.read_bytes()

    def _at(self, inside: str) -> Any:
        return self._hadoop.Path(posixpath.join(self._path, inside))

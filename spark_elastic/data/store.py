"""Folders for files: of this machine or a shared mount, of an object store, HDFS, or any filesystem of fsspec.

A `Store` is a folder; every path given to it is relative to that folder. It can be pickled, so executors and workers
open the same folder as the driver. Local folders need neither pyarrow nor fsspec.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import shutil
import stat
import tempfile
import uuid
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from spark_elastic.errors import StoreError
from spark_elastic.redaction import redacted

_PART = 1 << 20  # read at a time for a checksum: these bytes stay in the processor's cache until they are added up
_UNFINISHED = re.compile(r".+\.[0-9a-f]{32}\.partial")  # files that `write_bytes` has not renamed yet
_LOCAL = ("py::fsspec+file", "py::fsspec+('file', 'local')")  # pyarrow's names of fsspec's LocalFileSystem
#: Filesystems on which an upload appears whole when it is closed, and a rename would copy the file.
_OBJECT_STORES = frozenset(("s3", "gcs", "gs", "abfs", "abfss", "az", "adl", "oci", "r2"))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file or folder in a store."""

    path: str  # relative to the store that listed it
    nbytes: int  # the size; 0 for folders
    modified_s: float  # seconds since 1970, by the store's clock
    is_dir: bool


@dataclass(frozen=True)
class Store:
    """A folder. Make one with `create`, or with `sub` of another.

    Attributes:
        url: Its name in messages, without credentials.
        root: The folder's path within the filesystem, without a slash at its end.
        filesystem: A filesystem of pyarrow. None: this machine's own.
        address: `create(address, storage_options)` opens it again. It has the credentials that it was given with.
    """

    url: str
    root: str
    filesystem: Any = None
    address: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.address or self.url)
        object.__setattr__(self, "url", self.url if self.filesystem is None else redacted(self.url))

    @classmethod
    def create(cls, where: str | Path | Store | None, storage_options: Mapping[str, Any] | None = None) -> Store:
        """Return the store at `where`. Writes nothing.

        Args:
            where: A path, ``file:``, ``dbfs:``, any URI that pyarrow or fsspec knows, or a `Store`. None: this user's
                folder among the machine's temporary files.
            storage_options: Options of fsspec's filesystem, as with pandas. Any option selects fsspec over pyarrow.

        Raises:
            StoreError: No filesystem can open such a URI, or it refuses the options.
        """
        if isinstance(where, Store):
            return where
        if where is None:
            return cls._local(own_temporary_folder("data", "name a store"))
        text = os.fspath(where)
        scheme = urlsplit(text).scheme if "://" in text or text.startswith(("file:", "dbfs:")) else ""
        if scheme == "dbfs":  # mounted on every node: /dbfs, and Unity volumes as they are
            path = "/" + text.removeprefix("dbfs:").lstrip("/")
            return cls._local(path if path.startswith("/Volumes/") else f"/dbfs{path}")
        if scheme == "file":
            return cls._local(unquote(urlsplit(text).path))
        return cls._remote(text, scheme, storage_options) if scheme else cls._local(text)

    @classmethod
    def of(cls, filesystem: Any, root: str, url: str = "") -> Store:
        """Return a folder of a filesystem object of pyarrow or fsspec."""
        from pyarrow import fs

        if not isinstance(filesystem, fs.FileSystem):
            filesystem = fs.PyFileSystem(fs.FSSpecHandler(filesystem))
        root = root.rstrip("/") or ("/" if root.startswith("/") else "")
        while isinstance(filesystem, fs.SubTreeFileSystem):
            root = posixpath.join(filesystem.base_path, root.lstrip("/")).rstrip("/")
            filesystem = filesystem.base_fs
        if isinstance(filesystem, fs.LocalFileSystem) or filesystem.type_name in _LOCAL:
            return cls._local(root)
        name = filesystem.type_name.removeprefix("py::fsspec+").strip("()'\"").split("'")[0]
        return cls(url or f"{name}://{root.lstrip('/')}", root, filesystem)

    @classmethod
    def _local(cls, path: str | Path) -> Store:
        root = os.path.abspath(os.path.expanduser(path))
        return cls(root, root)

    @classmethod
    def _remote(cls, uri: str, scheme: str, storage_options: Mapping[str, Any] | None) -> Store:
        from pyarrow import ArrowException, fs

        reasons = []
        if not storage_options:
            try:
                filesystem, root = fs.FileSystem.from_uri(uri)
                return cls.of(filesystem, root, uri.rstrip("/"))
            except (ArrowException, OSError, ValueError, NotImplementedError) as error:
                reasons.append(f"pyarrow: {error}")
        try:
            import fsspec

            filesystem, root = fsspec.core.url_to_fs(uri, **(storage_options or {}))
            return cls.of(filesystem, root, uri.rstrip("/"))
        except Exception as error:  # each protocol's package has its own exceptions
            reasons.append(f"fsspec: {type(error).__name__}: {error}")
        raise StoreError(
            f"nothing here can open {uri!r}: {'; '.join(reasons)}. Install the fsspec package for {scheme}://, or use "
            "a path that all machines mount"
        )

    @property
    def is_local(self) -> bool:
        """True if the files have paths on this machine, which includes shared mounts."""
        return self.filesystem is None

    def local_path(self, path: str = "") -> Path:
        """Return the path of a file or folder on this machine. Raise StoreError if the store is remote."""
        if self.filesystem is not None:
            raise StoreError(f"{self.url} is a remote store: its files have no paths on this machine")
        return Path(self._at(path))

    def sub(self, path: str) -> Store:
        """Return the subfolder `path`."""
        return Store(f"{self.address.rstrip('/')}/{path.strip('/')}", self._at(path), self.filesystem)

    def read_bytes(self, path: str) -> bytes:
        if self.filesystem is None:
            return Path(self._at(path)).read_bytes()
        with self.filesystem.open_input_stream(self._at(path), compression=None) as stream:
            return bytes(stream.read())

    def write_bytes(
        self,
        path: str,
        data: bytes,
        *,
        only_if_absent: bool = False,
        durable: bool = True,
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Write a file atomically, and make the folders above it. Return whether it was written.

        With `only_if_absent`, a file that exists is kept. If two processes write at the same moment, the first one wins
        on local folders, the last one elsewhere. A `durable` file also survives a power cut, for which the call waits
        until the disk has written it and all before it. `check` is called when all is written, just before the file
        gets its name (before the upload to an object store); if it raises, there is no file.
        """
        check = check or (lambda: None)
        if self.filesystem is None:
            return self._write_local(Path(self._at(path)), data, only_if_absent, durable, check)
        if only_if_absent and self.exists(path):
            return False
        target = self._at(path)
        self._make_parent(target)
        written = target if self._uploads_whole else f"{target}.{uuid.uuid4().hex}.partial"
        if written == target:
            check()
        with self.filesystem.open_output_stream(written, compression=None) as stream:
            stream.write(data)
        if written != target:
            try:
                check()
                self._replace(written, target)
            except BaseException:
                with contextlib.suppress(Exception):  # each filesystem has its own
                    self.filesystem.delete_file(written)
                raise
        return True

    def now(self) -> float:
        """Return the present time by the store's clock, as of `FileEntry`; 0.0 if it does not say when files change."""
        name = f"clock-{uuid.uuid4().hex}.partial"  # the name of a file that clean-up removes
        try:
            self.write_bytes(name, b"", durable=False)
            return next((entry.modified_s for entry in self.list() if entry.path == name), 0.0)
        finally:
            self.delete(name)

    def exists(self, path: str = "") -> bool:
        if self.filesystem is None:
            return os.path.exists(self._at(path))
        return bool(self._file_info(path).type.name != "NotFound")

    def size(self, path: str) -> int | None:
        """Return the size of a file; None if there is no such file."""
        if self.filesystem is None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                status = os.stat(self._at(path))
                return status.st_size if stat.S_ISREG(status.st_mode) else None
            return None
        found = self._file_info(path)
        return int(found.size) if found.type.name == "File" else None

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileEntry]:
        """Return the entries of a folder, sorted by path; none if it does not exist."""
        if self.filesystem is None:
            return sorted(_local_entries(Path(self._at("")), Path(self._at(path)), recursive), key=lambda e: e.path)
        from pyarrow import fs

        selector = fs.FileSelector(self._at(path), recursive=recursive, allow_not_found=True)
        prefix = self.root.strip("/")
        found = []
        for info in self.filesystem.get_file_info(selector):
            relative = info.path.strip("/").removeprefix(prefix).lstrip("/")
            modified_s = info.mtime.timestamp() if info.mtime is not None else 0.0
            found.append(FileEntry(relative, int(info.size or 0), modified_s, info.type.name == "Directory"))
        return sorted(found, key=lambda entry: entry.path)

    def delete_unfinished(self) -> None:
        """Delete the files of the folder whose writers have died before they were complete.

        For a caller who knows that nobody writes there: a file that is being written cannot be told from those.
        """
        for entry in self.list():
            if not entry.is_dir and _UNFINISHED.fullmatch(entry.path):
                self.delete(entry.path)

    def delete(self, path: str = "") -> None:
        """Delete a file, or a folder with its contents, if it exists."""
        target = self._at(path)
        if self.filesystem is None:
            if os.path.isdir(target) and not os.path.islink(target):
                shutil.rmtree(target, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(target)
            return
        kind = self._file_info(path).type.name
        with contextlib.suppress(FileNotFoundError):
            if kind == "Directory":
                self.filesystem.delete_dir(target)
            elif kind != "NotFound":
                self.filesystem.delete_file(target)

    def open_input(self, path: str) -> Any:
        """Open a file as a pyarrow `RandomAccessFile`."""
        return self._arrow.open_input_file(self._at(path))

    def checksum(self, path: str) -> tuple[int, int]:
        """Return the size of a file and the CRC-32 of its contents."""
        nbytes, crc32 = 0, 0
        with open(self._at(path), "rb", buffering=0) if self.filesystem is None else self.open_input(path) as stream:
            while part := stream.read(_PART):
                nbytes, crc32 = nbytes + len(part), zlib.crc32(part, crc32)
        return nbytes, crc32

    def open_output(self, path: str) -> Any:
        """Open a pyarrow output stream to a new file, not compressed whatever its name, and make the folders above."""
        target = self._at(path)
        self._make_parent(target)
        return self._arrow.open_output_stream(target, compression=None)

    def __fspath__(self) -> str:
        return os.fspath(self.local_path())

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def _at(self, path: str) -> str:
        if ".." in path.split("/"):
            raise ValueError(f"{path!r} leads out of {self.url}")
        return posixpath.join(self.root, path.strip("/")).rstrip("/") or self.root

    @property
    def _arrow(self) -> Any:
        from pyarrow import fs

        return self.filesystem or fs.LocalFileSystem()

    def _file_info(self, path: str) -> Any:
        return self.filesystem.get_file_info(self._at(path))

    @property
    def _uploads_whole(self) -> bool:
        return not _OBJECT_STORES.isdisjoint(re.split("['(]", self._arrow.type_name))

    def _make_parent(self, target: str) -> None:
        parent = posixpath.dirname(target)
        if parent and not self._uploads_whole:
            self._arrow.create_dir(parent, recursive=True)

    def _replace(self, source: str, target: str) -> None:
        try:
            self.filesystem.move(source, target)
        except OSError:  # HDFS does not rename onto a file
            if self.filesystem.get_file_info(target).type.name != "File":
                raise
            self.filesystem.delete_file(target)
            self.filesystem.move(source, target)

    @staticmethod
    def _write_local(target: Path, data: bytes, only_if_absent: bool, durable: bool, check: Callable[[], None]) -> bool:
        make_folder(target.parent, durable)
        written = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            with written.open("wb") as stream:
                stream.write(data)
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())  # otherwise a power cut could leave an empty file of that name
            check()
            try:
                if only_if_absent:
                    os.link(written, target)  # unlike a rename this fails if the target exists
            except FileExistsError:
                return False
            except OSError:  # a mount without hard links
                if target.exists():
                    return False
                only_if_absent = False
            if not only_if_absent:
                os.replace(written, target)
            if durable:
                sync_folder(target.parent)
            return True
        finally:
            written.unlink(missing_ok=True)


def make_folder(folder: Path, durable: bool) -> None:
    """Make a folder and those above it; durable: so that they survive a power cut."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()] if durable else []
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a power cut may lose that of a file which is there."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a mount without fsync for folders
            raise
    finally:
        os.close(file)


def _local_entries(root: Path, folder: Path, recursive: bool) -> list[FileEntry]:
    found: list[FileEntry] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for child in os.scandir(folder):
            try:
                status, is_dir = child.stat(), child.is_dir()
            except FileNotFoundError:  # deleted meanwhile
                continue
            path = Path(child.path).relative_to(root).as_posix()
            found.append(FileEntry(path, 0 if is_dir else status.st_size, status.st_mtime, is_dir))
            if recursive and is_dir:
                found += _local_entries(root, Path(child.path), True)
    return found


def own_temporary_folder(kind: str, remedy: str) -> Path:
    """Return this user's temporary folder of a kind ("data", "cache"). Raise StoreError if it is another user's."""
    folder = Path(tempfile.gettempdir()) / f"spark_elastic-{kind}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{folder} belongs to another user; {remedy}")
    return folder

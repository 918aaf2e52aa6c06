"""Places that files live: a folder of this machine or of a shared mount, an object store, HDFS, anything of fsspec.

A `Store` is a folder; every path given to it is relative to that folder. It can be pickled, so executors and workers
open what the driver named. Local folders need neither pyarrow nor fsspec.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import shutil
import stat
import tempfile
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from spark_elastic.errors import StoreError

_PART = 1 << 20
"""Read at a time for a checksum: what stays in the processor's cache until it is added up."""
# An upload appears whole when it is closed, and renaming would copy it.
_OBJECT_STORES = ("s3", "gcs", "gs", "abfs", "abfss", "az", "adl", "oci", "r2")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """path: relative to the store that listed it. modified_s: seconds since the epoch, by the store's clock."""

    path: str
    nbytes: int
    modified_s: float
    is_dir: bool


@dataclass(frozen=True)
class Store:
    """A folder. Make one with `create`, or `sub` of another.

    url: what to call it in messages; `create(url, storage_options)` finds it again. root: the folder's path within the
    filesystem, without a slash at its end. filesystem: pyarrow's; None: this machine's own.
    """

    url: str
    root: str
    filesystem: Any = None

    @classmethod
    def create(cls, where: str | Path | Store | None, storage_options: Mapping[str, Any] | None = None) -> Store:
        """The store at `where`.

        where: a path, ``file:``, ``dbfs:``, any URI that pyarrow or fsspec knows, a `Store`, or None: a folder of this
            machine's temporary files that belongs to this user.
        storage_options: what fsspec's filesystem takes, as with pandas. Given any, fsspec is used rather than pyarrow.

        Nothing is written yet.

        Raises: StoreError: no filesystem for such a URI, or it does not take the options.
        """
        if isinstance(where, Store):
            return where
        if where is None:
            return cls._local(_own_temporary_folder())
        text = os.fspath(where)
        scheme = urlsplit(text).scheme if "://" in text or text.startswith(("file:", "dbfs:")) else ""
        if scheme == "dbfs":  # mounted on every node: /dbfs, and Unity volumes as they are
            path = "/" + text.removeprefix("dbfs:").lstrip("/")
            return cls._local(path if path.startswith("/Volumes/") else f"/dbfs{path}")
        if scheme == "file":
            return cls._local(unquote(urlsplit(text).path))
        if not scheme:
            return cls._local(text)
        return cls._remote(text, scheme, storage_options)

    @classmethod
    def of(cls, filesystem: Any, root: str, url: str = "") -> Store:
        """A folder of a filesystem object: one of pyarrow, or of fsspec."""
        from pyarrow import fs

        if not isinstance(filesystem, fs.FileSystem):
            filesystem = fs.PyFileSystem(fs.FSSpecHandler(filesystem))
        root = root.rstrip("/") or ("/" if root.startswith("/") else "")
        while isinstance(filesystem, fs.SubTreeFileSystem):
            root = posixpath.join(filesystem.base_path, root.lstrip("/")).rstrip("/")
            filesystem = filesystem.base_fs
        if _is_local(filesystem):
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
        except Exception as error:  # each protocol's package has errors of its own
            reasons.append(f"fsspec: {type(error).__name__}: {error}")
        raise StoreError(
            f"nothing here can open {uri!r}: {'; '.join(reasons)}. Install the fsspec package for {scheme}://, or use "
            "a path that all machines mount",
            url=uri,
        )

    @property
    def is_local(self) -> bool:
        """Whether its files are plain files of this machine's file tree, a shared mount included."""
        return self.filesystem is None

    def local_path(self, path: str = "") -> Path:
        """Raises: StoreError: the store is remote."""
        if self.filesystem is not None:
            raise StoreError(f"{self.url} has no paths on this machine", url=self.url)
        return Path(self._at(path))

    def sub(self, path: str) -> Store:
        """The folder `path` of this one."""
        return Store(f"{self.url.rstrip('/')}/{path.strip('/')}", self._at(path), self.filesystem)

    def read_bytes(self, path: str) -> bytes:
        """Raises: FileNotFoundError."""
        if self.filesystem is None:
            return Path(self._at(path)).read_bytes()
        with self.filesystem.open_input_stream(self._at(path), compression=None) as stream:
            return bytes(stream.read())

    def write_bytes(self, path: str, data: bytes, *, only_if_absent: bool = False, durable: bool = True) -> bool:
        """A whole file or none of it, whoever looks and whenever this process ends. Makes the folders above it.

        only_if_absent: leaves a file that is there alone; between two that write at the same moment this decides on
            local folders, elsewhere the later one stays.
        durable: it also survives a power cut, under its name. That costs waits for the disk, behind all that was
            written lately.

        Returns: whether it was written.
        """
        if self.filesystem is None:
            return self._write_local(Path(self._at(path)), data, only_if_absent, durable)
        if only_if_absent and self.exists(path):
            return False
        target = self._at(path)
        self._make_parent(target)
        written = target if self._uploads_whole else f"{target}.{uuid.uuid4().hex}.partial"
        with self.filesystem.open_output_stream(written, compression=None) as stream:
            stream.write(data)
        if written != target:
            self._replace(written, target)
        return True

    def exists(self, path: str = "") -> bool:
        if self.filesystem is None:
            return os.path.exists(self._at(path))
        return bool(self._file_info(path).type.name != "NotFound")

    def size(self, path: str) -> int | None:
        """Bytes of a file; None: there is no such file."""
        if self.filesystem is None:
            try:
                status = os.stat(self._at(path))
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        found = self._file_info(path)
        return int(found.size) if found.type.name == "File" else None

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileEntry]:
        """What lies in a folder, by name; nothing if it does not exist."""
        if self.filesystem is None:
            return sorted(_local_entries(Path(self._at("")), Path(self._at(path)), recursive), key=lambda e: e.path)
        from pyarrow import fs

        selector = fs.FileSelector(self._at(path), recursive=recursive, allow_not_found=True)
        prefix = self.root.strip("/")
        found = [
            FileEntry(
                info.path.strip("/").removeprefix(prefix).lstrip("/"),
                int(info.size or 0),
                info.mtime.timestamp() if info.mtime is not None else 0.0,
                info.type.name == "Directory",
            )
            for info in self.filesystem.get_file_info(selector)
        ]
        return sorted(found, key=lambda entry: entry.path)

    def delete(self, path: str = "") -> None:
        """A file, or a folder with everything in it; what is missing is fine."""
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
        """A pyarrow `RandomAccessFile`. Raises: FileNotFoundError."""
        return self._arrow().open_input_file(self._at(path))

    def checksum(self, path: str) -> tuple[int, int]:
        """Read a file in parts. Returns: its bytes, and their CRC-32. Raises: FileNotFoundError."""
        nbytes, crc32 = 0, 0
        with open(self._at(path), "rb", buffering=0) if self.filesystem is None else self.open_input(path) as stream:
            while part := stream.read(_PART):
                nbytes, crc32 = nbytes + len(part), zlib.crc32(part, crc32)
        return nbytes, crc32

    def open_output(self, path: str) -> Any:
        """A pyarrow output stream to a new file, never compressed, whatever its name. Makes the folders above it."""
        target = self._at(path)
        self._make_parent(target)
        return self._arrow().open_output_stream(target, compression=None)

    def check_shared(self, spark: Any) -> None:
        """Ask the executors whether they see this folder as the driver does.

        Raises: StoreError: they do not; with what to do.
        """
        from spark_elastic.data.sharing import check_shared

        check_shared(self, spark.sparkContext)

    def __fspath__(self) -> str:
        return os.fspath(self.local_path())

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def _at(self, path: str) -> str:
        if ".." in path.split("/"):
            raise ValueError(f"{path!r} leads out of {self.url}")
        path = path.strip("/")
        return posixpath.join(self.root, path) if path else self.root

    def _arrow(self) -> Any:
        if self.filesystem is not None:
            return self.filesystem
        from pyarrow import fs

        return fs.LocalFileSystem()

    def _file_info(self, path: str) -> Any:
        return self.filesystem.get_file_info(self._at(path))

    @property
    def _uploads_whole(self) -> bool:
        name = self.filesystem.type_name
        return any(kind in name.replace("(", "'").split("'") or name == kind for kind in _OBJECT_STORES)

    def _make_parent(self, target: str) -> None:
        parent = posixpath.dirname(target)
        if self.filesystem is None:
            os.makedirs(parent, exist_ok=True)
        elif parent and not self._uploads_whole:
            self.filesystem.create_dir(parent, recursive=True)

    def _replace(self, source: str, target: str) -> None:
        try:
            self.filesystem.move(source, target)
        except OSError:  # HDFS does not rename onto a file
            if self.filesystem.get_file_info(target).type.name != "File":
                raise
            self.filesystem.delete_file(target)
            self.filesystem.move(source, target)

    @staticmethod
    def _write_local(target: Path, data: bytes, only_if_absent: bool, durable: bool) -> bool:
        make_folder(target.parent, durable)
        written = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        try:
            with written.open("wb") as stream:
                stream.write(data)
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())  # or a power cut leaves the name with nothing behind it
            if not Store._name(written, target, only_if_absent):
                return False
            if durable:
                sync_folder(target.parent)
            return True
        finally:
            written.unlink(missing_ok=True)

    @staticmethod
    def _name(written: Path, target: Path, only_if_absent: bool) -> bool:
        """Let a file that is written appear as `target`. Returns: False: it was to be absent, and is not."""
        if only_if_absent:
            try:
                os.link(written, target)  # fails if it exists, which rename does not
                return True
            except FileExistsError:
                return False
            except OSError:  # a mount without hard links
                if target.exists():
                    return False
        os.replace(written, target)
        return True


def make_folder(folder: Path, durable: bool) -> None:
    """Make a folder and those above it. durable: their names survive a power cut."""
    missing = []
    above = folder
    while durable and not above.exists():
        missing.append(above)
        above = above.parent
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: those of new files, and what renames have made of them.

    Without it a power cut may leave a file that was waited for without its name.
    """
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a mount whose folders cannot be waited for
            raise
    finally:
        os.close(file)


def _is_local(filesystem: Any) -> bool:
    from pyarrow import fs

    return isinstance(filesystem, fs.LocalFileSystem) or filesystem.type_name in (
        "py::fsspec+file",
        "py::fsspec+('file', 'local')",
    )


def _local_entries(root: Path, folder: Path, recursive: bool) -> list[FileEntry]:
    found: list[FileEntry] = []
    try:
        children = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return found
    for child in children:
        try:
            status, is_dir = child.stat(), child.is_dir()
        except FileNotFoundError:  # somebody deleted it meanwhile
            continue
        path = Path(child.path).relative_to(root).as_posix()
        found.append(FileEntry(path, 0 if is_dir else status.st_size, status.st_mtime, is_dir))
        if recursive and is_dir:
            found += _local_entries(root, Path(child.path), True)
    return found


def _own_temporary_folder() -> Path:
    """Raises: StoreError: somebody else made a folder of that name: sets in it are not to be trusted."""
    folder = Path(tempfile.gettempdir()) / f"spark_elastic-data-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or not os.path.isdir(folder) or folder.is_symlink()):
        raise StoreError(f"{folder} belongs to another user; name a store", url=str(folder))
    return folder

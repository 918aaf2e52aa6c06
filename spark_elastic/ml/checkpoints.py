"""Durable checkpoints: written in the background, complete or not there at all.

A checkpoint is a folder. Its files come first; `checkpoint.json` comes last and names each with its size and checksum.
So one that was cut off anywhere has no `checkpoint.json`, or one that does not fit what lies beside it, and neither is
ever loaded. Nothing in it can run code: JSON, and tensors that `torch.load(weights_only=True)`, or `numpy.load` without
pickles, reads.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.errors import CheckpointError

if TYPE_CHECKING:
    from spark_elastic.data.store import Store

log = logging.getLogger("spark_elastic.ml")

FORMAT = "spark_elastic.checkpoint"
FORMAT_VERSION = 1
MANIFEST = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What is known of a complete checkpoint without loading it.

    name: of its folder; names sort by age. best: of what the run follows, that by which this is the best epoch so far.
    """

    name: str
    step: int
    epoch: int
    position: int
    best: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contents:
    """What is written. document: plain values for JSON. files: by name, bytes."""

    facts: CheckpointFacts
    document: Mapping[str, Any]
    files: Mapping[str, bytes]


class Checkpoints:
    """The checkpoints of a run, in a folder of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def complete(self) -> list[CheckpointFacts]:
        """Those that can be loaded, oldest first. Sizes are looked at; checksums only when one is loaded."""
        found = []
        for name in self._names():
            try:
                found.append(self._facts(name))
            except CheckpointError as error:
                log.info("%s", error)
        return found

    def latest(self) -> CheckpointFacts | None:
        """The newest that can be loaded, with its checksums looked at; `Training.resume_from` is its name."""
        for name in reversed(self._names()):
            try:
                self.load(name)
                return self._facts(name)
            except CheckpointError as error:
                log.warning("%s; an older one is taken", error)
        return None

    def best(self, of: str | None = None) -> CheckpointFacts | None:
        """The newest that was the best when it was written; of: by this."""
        return next((facts for facts in reversed(self.complete()) if (of in facts.best if of else facts.best)), None)

    def load(self, name: str) -> Contents:
        """Raises: CheckpointError: missing, cut off or damaged."""
        manifest = self._manifest(name)
        files = {}
        for file, (nbytes, crc32) in manifest["files"].items():
            data = self._read(name, file)
            if len(data) != nbytes or zlib.crc32(data) != crc32:
                raise CheckpointError(f"checkpoint {name} in {self.store} is damaged: {file} is not what was written")
            files[file] = data
        return Contents(self._facts(name), manifest["document"], files)

    def write(self, contents: Contents) -> None:
        """All files, then the manifest. Raises: whatever the store raises."""
        name = contents.facts.name
        for file, data in contents.files.items():
            self.store.write_bytes(f"{name}/{file}", data)
        manifest = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "step": contents.facts.step,
            "epoch": contents.facts.epoch,
            "position": contents.facts.position,
            "best": list(contents.facts.best),
            "files": {file: [len(data), zlib.crc32(data)] for file, data in contents.files.items()},
            "document": dict(contents.document),
        }
        self.store.write_bytes(f"{name}/{MANIFEST}", json.dumps(manifest, indent=1).encode())

    def keep(self, newest: int) -> None:
        """Remove all but the newest so many and the last that was best by each of what is followed; also what was never
        completed before them."""
        complete = self.complete()
        kept = {facts.name for facts in complete[-newest:]}
        kept |= set({followed: facts.name for facts in complete for followed in facts.best}.values())
        for name in self._names():
            if name not in kept and complete and name < complete[-1].name:
                self.store.delete(f"{name}/{MANIFEST}")  # first: what is left of it must not look complete
                self.store.delete(name)

    def _names(self) -> list[str]:
        entries = self.store.list() if self.store.exists() else []
        return sorted(entry.path.rstrip("/").rpartition("/")[2] for entry in entries if entry.is_dir)

    def _read(self, name: str, file: str) -> bytes:
        try:
            return bytes(self.store.read_bytes(f"{name}/{file}"))
        except Exception as error:  # each kind of storage has its own error for what is missing
            raise CheckpointError(f"checkpoint {name} in {self.store} cannot be read: {file}: {error}") from error

    def _manifest(self, name: str) -> dict[str, Any]:
        try:
            manifest = json.loads(self._read(name, MANIFEST))
        except ValueError as error:
            raise CheckpointError(f"checkpoint {name} in {self.store} is incomplete: {MANIFEST}: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise CheckpointError(f"{name} in {self.store} is no checkpoint of this package")
        if manifest.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {name} is of version {manifest.get('version')!r}; this is version {FORMAT_VERSION}"
            )
        try:
            known = [type(manifest[key]) for key in ("step", "epoch", "position")] == [int] * 3
            known = known and isinstance(manifest["best"], list) and isinstance(manifest["document"], dict)
            for file, (nbytes, crc32) in manifest["files"].items():
                known = known and "/" not in file and isinstance(nbytes, int) and isinstance(crc32, int)
        except (KeyError, TypeError, ValueError, AttributeError):
            known = False
        if not known:
            raise CheckpointError(f"checkpoint {name} in {self.store} is damaged: {MANIFEST} is not what was written")
        return manifest

    def _facts(self, name: str) -> CheckpointFacts:
        manifest = self._manifest(name)
        for file, (nbytes, _) in manifest["files"].items():
            have = self.store.size(f"{name}/{file}")
            if have != nbytes:
                raise CheckpointError(f"checkpoint {name} in {self.store} is incomplete: {file} has {have} bytes")
        return CheckpointFacts(name, manifest["step"], manifest["epoch"], manifest["position"], tuple(manifest["best"]))


class CheckpointWriter:
    """Writes checkpoints on a thread of its own, one after the other.

    A checkpoint that cannot be written is logged and training goes on; `drain` raises what the last one failed with.
    """

    def __init__(self, checkpoints: Checkpoints, keep: int) -> None:
        self._checkpoints = checkpoints
        self._keep = keep
        self._waiting: queue.Queue[Callable[[], Contents] | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether one that comes now would have to wait."""
        return self._waiting.unfinished_tasks > 0

    def submit(self, contents: Callable[[], Contents]) -> None:
        """Write what the function returns, which is called on the thread. Blocks while two are under way."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="spark-elastic-checkpoints", daemon=True)
            self._thread.start()
        self._waiting.put(contents)

    def drain(self) -> None:
        """Wait until all are written. Raises: CheckpointError: the last one could not be."""
        self._waiting.join()
        if self._error is not None:
            raise CheckpointError(f"the last checkpoint could not be written: {self._error}") from self._error

    def close(self) -> None:
        """Let what is under way end; nothing may be submitted any more."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (make := self._waiting.get()) is not None:
            try:
                self._checkpoints.write(make())
                self._checkpoints.keep(self._keep)
                self._error = None
            except Exception as error:  # a storage's hiccup is no reason to end a training
                self._error = error
                log.exception("a checkpoint could not be written; training goes on")
            finally:
                self._waiting.task_done()
        self._waiting.task_done()

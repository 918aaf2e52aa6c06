"""Durable checkpoints: written in the background, complete or not there at all.

A checkpoint is a folder. Its files come first; `checkpoint.json` comes last and names each with its size and checksum,
and has a checksum of its own. So one that was cut off anywhere has no `checkpoint.json`, and one that has changed since
does not fit what lies beside it: neither is ever loaded. Nothing in it can run code: JSON, and tensors that
`torch.load(weights_only=True)`, or `numpy.load` without pickles, reads.
"""

from __future__ import annotations

import logging
import queue
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.data.manifest import seal, unseal
from spark_elastic.errors import CheckpointError, RunTakenError

if TYPE_CHECKING:
    from spark_elastic.data.store import Store
    from spark_elastic.ml.run_lease import Fence

log = logging.getLogger("spark_elastic.ml")

FORMAT = "spark_elastic.checkpoint"
FORMAT_VERSION = 1
MANIFEST = "checkpoint.json"
_FIELDS = frozenset(("format", "version", "step", "epoch", "position", "best", "files", "document", "token"))


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What is known of a complete checkpoint without loading it.

    name: of its folder, see `name_of`. best: of what the run follows, that by which this is the best epoch so far.
    token: of the driver that held the run's lease.
    """

    name: str
    step: int
    epoch: int
    position: int
    best: tuple[str, ...] = ()
    token: int = 0


def name_of(serial: int, token: int = 0) -> str:
    """Return the name of a checkpoint's folder: that of a driver which has lost its lease is never that of another.

    serial: steps and turns so far. token: of the driver's lease on the run.
    """
    return f"{serial:012d}" if not token else f"{serial:012d}.{token:06d}"


def age_of(name: str) -> tuple[int, str]:
    """Return what sorts names by age: whatever a driver with a later token has written is newer."""
    serial, _, token = name.partition(".")
    return int(token) if token.isdecimal() else 0, serial


@dataclass(frozen=True, slots=True)
class Contents:
    """What is written. document: plain values for JSON. files: by name, bytes."""

    facts: CheckpointFacts
    document: Mapping[str, Any]
    files: Mapping[str, bytes]


class Checkpoints:
    """The checkpoints of a run, in a folder of a store.

    fence: of the driver that has the run; None: nobody else can have it.
    """

    @property
    def token(self) -> int:
        """Of those that are written here."""
        return self._fence.token if self._fence is not None else 0

    def newest_token(self) -> int:
        """The largest of those that are there; 0: there is none."""
        return max((age_of(name)[0] for name in self._names()), default=0)

    def __init__(self, store: Store, fence: Fence | None = None) -> None:
        self.store = store
        self._fence = fence
        self._sound: set[str] = set()
        """Names of those whose files were read and had the right checksums."""

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
        """Find the newest that can be loaded, with its checksums looked at; `Training.resume_from` is its name.

        Returns: None: none was ever completed.
        Raises: CheckpointError: there are some, and none of them can be loaded.
        """
        damaged = []
        for name in reversed(self._names()):
            try:
                found = self._checked(name)
            except CheckpointError as error:
                if self._was_completed(name):
                    damaged.append(str(error))
                continue
            for complaint in damaged:
                log.warning("%s; an older one is taken", complaint)
            return found
        if damaged:
            raise CheckpointError(
                f"none of the checkpoints in {self.store} can be loaded, and a new start would replace them: "
                f"{'; '.join(damaged)}. Bring one of them back from a copy, choose another run_id, or set resume=False "
                "to delete them and start over"
            )
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
            self._compare(name, file, (len(data), zlib.crc32(data)), (nbytes, crc32))
            files[file] = data
        return Contents(self._facts(name), manifest["document"], files)

    def write(self, contents: Contents) -> None:
        """All files, then the manifest.

        Raises: RunTakenError: another driver has the run; and whatever the store raises.
        """
        name = contents.facts.name
        self._check_fence()
        for file, data in contents.files.items():
            self.store.write_bytes(f"{name}/{file}", data)
        manifest = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "step": contents.facts.step,
            "epoch": contents.facts.epoch,
            "position": contents.facts.position,
            "best": list(contents.facts.best),
            "token": contents.facts.token,
            "files": {file: [len(data), zlib.crc32(data)] for file, data in contents.files.items()},
            "document": dict(contents.document),
        }
        self._check_fence()
        self.store.write_bytes(f"{name}/{MANIFEST}", seal(manifest))

    def _check_fence(self) -> None:
        if self._fence is not None:
            self._fence.check()

    def keep(self, newest: int) -> None:
        """Remove all but the newest so many and the last that was best by each of what is followed; also what was never
        completed before them.

        Those that do not have the right checksums do not count; each is read once for that.
        """
        kept: list[str] = []
        followed: set[str] = set()
        for facts in reversed(self.complete()):
            wanted = len(kept) < newest or not followed.issuperset(facts.best)
            if wanted and self._is_sound(facts.name):
                kept.append(facts.name)
                followed.update(facts.best)
        for name in self._names():
            if name not in kept and kept and age_of(name) < age_of(kept[0]):
                self.store.delete(f"{name}/{MANIFEST}")  # first: what is left of it must not look complete
                self.store.delete(name)

    def _is_sound(self, name: str) -> bool:
        if name not in self._sound:
            try:
                self._checked(name)
            except CheckpointError as error:
                log.warning("%s; it does not count as one that is kept", error)
                return False
            self._sound.add(name)
        return True

    def _checked(self, name: str) -> CheckpointFacts:
        """Read all files, in parts. Raises: CheckpointError: missing, cut off or damaged."""
        for file, (nbytes, crc32) in self._manifest(name)["files"].items():
            try:
                found = self.store.checksum(f"{name}/{file}")
            except Exception as error:  # each kind of storage has its own error for what is missing
                raise self._unreadable(name, file, error) from error
            self._compare(name, file, found, (nbytes, crc32))
        return self._facts(name)

    def _compare(self, name: str, file: str, found: tuple[int, int], expected: tuple[int, int]) -> None:
        if found != expected:
            raise CheckpointError(
                f"checkpoint {name} in {self.store} is damaged: {file} is not what was written: {found[0]} bytes with "
                f"the checksum {found[1]:08x}, and not {expected[0]} with {expected[1]:08x}"
            )

    def _unreadable(self, name: str, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"checkpoint {name} in {self.store} cannot be read: {file}: {error}")

    def _was_completed(self, name: str) -> bool:
        """Whether its write came to its end; also if that cannot be told."""
        try:
            return self.store.exists(f"{name}/{MANIFEST}")
        except Exception:  # each kind of storage has its own
            return True

    def _names(self) -> list[str]:
        """Of all that are there, complete or not, oldest first."""
        entries = self.store.list() if self.store.exists() else []
        return sorted((entry.path.rstrip("/").rpartition("/")[2] for entry in entries if entry.is_dir), key=age_of)

    def _read(self, name: str, file: str) -> bytes:
        try:
            return bytes(self.store.read_bytes(f"{name}/{file}"))
        except Exception as error:  # each kind of storage has its own error for what is missing
            raise self._unreadable(name, file, error) from error

    def _manifest(self, name: str) -> dict[str, Any]:
        """Raises: CheckpointError: missing, not what was written, or of another version, with the field."""
        where = f"checkpoint {name} in {self.store}"
        try:
            manifest = unseal(self._read(name, MANIFEST), _FIELDS)
        except ValueError as error:
            raise CheckpointError(f"{where} is incomplete or damaged: {MANIFEST}: {error}") from error
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{name} in {self.store} is no checkpoint of this package")
        if manifest.get("version") != FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint {name} is of version {manifest.get('version')!r}; this is version {FORMAT_VERSION}"
            )
        manifest.setdefault("token", 0)
        kinds = {
            "step": int,
            "epoch": int,
            "position": int,
            "token": int,
            "best": list,
            "document": dict,
            "files": dict,
        }
        for field, kind in kinds.items():
            if type(manifest.get(field)) is not kind:
                raise CheckpointError(
                    f"{where} is damaged: {MANIFEST}: {field} is {manifest.get(field)!r:.80}, not of {kind.__name__}"
                )
        if not all(isinstance(each, str) for each in manifest["best"]):
            raise CheckpointError(f"{where} is damaged: {MANIFEST}: best is {manifest['best']!r:.80}, not names")
        for file, facts in manifest["files"].items():
            numbers = isinstance(facts, list) and len(facts) == 2 and all(type(number) is int for number in facts)
            if not numbers or "/" in file or file in ("", ".", ".."):
                raise CheckpointError(f"{where} is damaged: {MANIFEST}: files has {file!r:.80}: {facts!r:.80}")
        return manifest

    def _facts(self, name: str) -> CheckpointFacts:
        manifest = self._manifest(name)
        for file, (nbytes, _) in manifest["files"].items():
            have = self.store.size(f"{name}/{file}")
            if have != nbytes:
                raise CheckpointError(f"checkpoint {name} in {self.store} is incomplete: {file} has {have} bytes")
        return CheckpointFacts(
            name,
            manifest["step"],
            manifest["epoch"],
            manifest["position"],
            tuple(manifest["best"]),
            manifest["token"],
        )


class CheckpointWriter:
    """Writes checkpoints on a thread of its own, one after the other.

    A checkpoint that cannot be written is logged and training goes on; `drain` raises what the last one failed with.

    tell: says to people, on the writer's thread, that checkpoints cannot be written, and that they can again.
    """

    def __init__(self, checkpoints: Checkpoints, keep: int, tell: Callable[[str], None] = lambda text: None) -> None:
        self._checkpoints = checkpoints
        self._keep = keep
        self._tell = tell
        self.fenced: RunTakenError | None = None
        """Another driver has the run: nothing is written any more."""
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
        failing = False
        while (make := self._waiting.get()) is not None:
            try:
                self._checkpoints.write(make())
                self._checkpoints.keep(self._keep)
                self._error = None
                if failing:
                    self._tell("checkpoints can be written again")
                failing = False
            except RunTakenError as error:
                self._error = self.fenced = error
            except Exception as error:  # a storage's hiccup is no reason to end a training
                self._error = error
                log.exception("a checkpoint could not be written; training goes on")
                if not failing:
                    self._tell(f"a checkpoint could not be written ({_first_line(error)}); training goes on")
                failing = True
            finally:
                self._waiting.task_done()
        self._waiting.task_done()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]

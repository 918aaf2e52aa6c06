"""Durable checkpoints: written in the background, and either complete or ignored.

A checkpoint is a folder. Its files are written first; `checkpoint.json` is written last, lists each file with size and
checksum, and has a checksum itself. So a write that was cut off left no `checkpoint.json`, and a file that changed
later does not match it: neither is ever loaded. Nothing in a checkpoint can run code: it holds JSON, and tensors that
`torch.load(weights_only=True)` or `numpy.load` without pickles reads.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spark_elastic import clock
from spark_elastic.data.manifest import names_in, seal, typed, unseal, whole_number
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, RunTakenError
from spark_elastic.redaction import class_and_first_line, redacted
from spark_elastic.runs.lease import Fence

log = logging.getLogger("spark_elastic.runs")

FORMAT = "spark_elastic.checkpoint"
FORMAT_VERSION = 1
MANIFEST = "checkpoint.json"
CHECKPOINTS = "checkpoints"  # in a run's folder: the folder of its checkpoints
READ_PAUSES_S = (0.5, 1.0, 2.0, 4.0)  # between the attempts to read a file
SLOW_S = 30.0  # a write that takes longer is shown, and again after twice the time
PATIENCE_S = 2.0
CLOSE_S = 30.0  # how long `close` waits for a write
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NUMBERS = ("step", "epoch", "position", "token")
_FILE_NAME = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The facts of a complete checkpoint that its manifest holds."""

    name: str  # of its folder, see `name_of`
    step: int
    epoch: int
    position: int
    best: tuple[str, ...] = ()  # the values that callbacks follow by which it is the best so far
    token: int = 0  # of the driver's lease on the run


def name_of(serial: int, token: int = 0) -> str:
    """Return a checkpoint's folder name: `serial` counts steps and validation turns, `token` is of the lease."""
    return f"{serial:012d}" if not token else f"{serial:012d}.{token:06d}"


def age_of(name: str) -> tuple[int, str]:
    """Return a key that sorts names from the oldest to the newest checkpoint: by the driver's token, then by serial."""
    serial, _, token = name.partition(".")
    return int(token) if token.isdecimal() else 0, serial


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint: plain values for JSON (`document`), and files by name."""

    facts: CheckpointFacts
    document: Mapping[str, Any]
    files: Mapping[str, bytes]


class Checkpoints:
    """The checkpoints of a run, in a folder of a store. Without a fence, no other driver can take the run."""

    def __init__(self, store: Store, fence: Fence | None = None, pause: Callable[[float], None] = time.sleep) -> None:
        self.store = store
        self._fence = fence
        self._pause = pause
        self._sound: set[str] = set()  # names of checkpoints whose files were read and had the right checksums
        self._unreadable: set[str] = set()  # names of those that the storage did not let be read: they may be intact

    def newest_token(self) -> int:
        """Return the largest token among the present checkpoints; 0 if there is none."""
        return max((age_of(name)[0] for name in self._names()), default=0)

    def complete(self) -> list[CheckpointFacts]:
        """Return the complete checkpoints, oldest first. Compares sizes; checksums are compared by `load`."""
        found = []
        self._unreadable.clear()
        for name in self._names():
            try:
                manifest = self._manifest(name)
                for file, (nbytes, _) in manifest["files"].items():
                    have = self.store.size(f"{name}/{file}")
                    if have != nbytes:
                        raise CheckpointError(
                            f"checkpoint {name} in {self.store} is incomplete: {file} has {have} bytes"
                        )
                found.append(_facts_in(name, manifest))
            except CheckpointError as error:
                self._note(name, error)
                log.info("%s", error)
        return found

    def latest(self) -> CheckpointFacts | None:
        """Return the newest intact checkpoint. Raise `CheckpointError` if all are damaged, or one cannot be read."""
        damaged = []
        for name in reversed(self._names()):
            try:
                found = self._checked(name)
            except CheckpointError as error:
                if getattr(error, "unreadable", False):
                    error.message += (
                        ". It may be intact, and to resume from an older one would replace it: start again when the "
                        "storage answers, or delete the folder of this checkpoint to resume from the one before"
                    )
                    raise
                if self._may_exist(f"{name}/{MANIFEST}"):
                    damaged.append(str(error))
                continue
            for complaint in damaged:
                log.warning("%s; an older one is taken", complaint)
            return found
        if damaged:
            raise CheckpointError(
                f"none of the checkpoints in {self.store} can be loaded, and a new start would replace them: "
                f"{'; '.join(damaged)}. Bring one of them back from a copy, choose another run_id, or "
                "delete them to start over (an estimator with resume=False does)"
            )
        return None

    def load(self, name: str) -> Contents:
        """Read a checkpoint. Raises `CheckpointError` if it is missing, cut off or damaged."""
        manifest = self._manifest(name)
        files = {}
        for file, written in manifest["files"].items():
            data = files[file] = bytes(self._read(self.store.read_bytes, name, file))
            self._compare(name, file, (len(data), zlib.crc32(data)), written)
        return Contents(_facts_in(name, manifest), manifest["document"], files)

    def write(self, contents: Contents) -> None:
        """Write all files, then the manifest. Raises `RunTakenError` if another driver has taken over the run."""
        facts = asdict(contents.facts)
        name = facts.pop("name")
        self._check_fence()
        for file, data in contents.files.items():
            self.store.write_bytes(f"{name}/{file}", data)
        manifest = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            **facts,
            "files": {file: [len(data), zlib.crc32(data)] for file, data in contents.files.items()},
            "document": dict(contents.document),
        }
        self.store.write_bytes(f"{name}/{MANIFEST}", seal(manifest), check=self._check_fence)

    def _check_fence(self) -> None:
        if self._fence is not None:
            self._fence.check()

    def keep(self, newest: int) -> None:
        """Remove all but the `newest` last checkpoints and the last best one by each followed value.

        Incomplete checkpoints that are older than those are removed, too. Damaged ones are not counted as kept; each
        checkpoint is read once to find out. Those that the storage does not let be read stay. Raises `RunTakenError` if
        another driver has taken over the run, which may resume from one of these.
        """
        kept: list[str] = []
        followed: set[str] = set()
        for facts in reversed(self.complete()):
            if len(kept) >= newest and followed.issuperset(facts.best):
                continue
            try:
                if facts.name not in self._sound:
                    self._checked(facts.name)
            except CheckpointError as error:
                self._note(facts.name, error)
                log.warning("%s; not counted among the checkpoints to keep", error)
                continue
            self._sound.add(facts.name)
            kept.append(facts.name)
            followed.update(facts.best)
        for name in self._names():
            if kept and age_of(name) < age_of(kept[0]) and name not in (*kept, *self._unreadable):
                self._check_fence()
                self.store.delete(f"{name}/{MANIFEST}")  # first, so that the rest never looks complete
                self.store.delete(name)

    def _note(self, name: str, error: CheckpointError) -> None:
        if getattr(error, "unreadable", False):
            self._unreadable.add(name)

    def _checked(self, name: str) -> CheckpointFacts:
        """Compare the checksums of all files. Raises `CheckpointError` if one is missing, cut off or damaged."""
        manifest = self._manifest(name)
        for file, written in manifest["files"].items():
            found = self._read(self.store.checksum, name, file)
            if list(found) != written:  # perhaps read wrongly
                found = self._read(self.store.checksum, name, file)
            self._compare(name, file, found, written)
        return _facts_in(name, manifest)

    def _compare(self, name: str, file: str, found: tuple[int, int], expected: list[int]) -> None:
        if list(found) != expected:
            raise CheckpointError(
                f"checkpoint {name} in {self.store} is damaged: {file} is not what was written: {found[0]} bytes with "
                f"the checksum {found[1]:08x}, not {expected[0]} with {expected[1]:08x}"
            )

    def _may_exist(self, path: str) -> bool:
        """Return whether a file exists; True if the storage does not say."""
        try:
            return self.store.exists(path)
        except Exception:  # each kind of storage has its own
            return True

    def _names(self) -> list[str]:
        entries = self.store.list()
        return sorted((entry.path.rstrip("/").rpartition("/")[2] for entry in entries if entry.is_dir), key=age_of)

    def _read(self, read: Callable[[str], Any], name: str, file: str) -> Any:
        """Read a file, again if the storage fails. Raises `CheckpointError`: `unreadable` if the file is there."""
        for pause_s in (*READ_PAUSES_S, None):
            try:
                return read(f"{name}/{file}")
            except Exception as error:  # each kind of storage has its own, also for what is missing
                missing = isinstance(error, _MISSING) or not self._may_exist(f"{name}/{file}")
                if missing or pause_s is None:
                    raise CheckpointError(
                        f"checkpoint {name} in {self.store} cannot be read: {file}: {error}", unreadable=not missing
                    ) from error
                log.warning("checkpoint %s in %s: %s: %s; it is read again", name, self.store, file, error)
                self._pause(pause_s)
        raise AssertionError

    def _manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest. Raises `CheckpointError`, naming the field, if it is damaged or of another version."""
        text = self._read(self.store.read_bytes, name, MANIFEST)
        try:
            manifest = unseal(text)
            if manifest.get("format") != FORMAT:
                raise CheckpointError(f"{name} in {self.store} is not a checkpoint of this package")
            if manifest.get("version") != FORMAT_VERSION:
                version = f"{manifest.get('version')!r:.40}"
                raise CheckpointError(f"checkpoint {name} has version {version}; this package reads {FORMAT_VERSION}")
            for field in _NUMBERS:
                whole_number(manifest.get(field), field)
            names_in(manifest, "best")
            typed(manifest, "document", dict)
            for file, facts in typed(manifest, "files", dict).items():
                numbers = isinstance(facts, list) and len(facts) == 2 and all(type(number) is int for number in facts)
                if not numbers or not _FILE_NAME.fullmatch(file):
                    raise ValueError(f"files has {file!r:.80}: {facts!r:.80}")
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            where = f"checkpoint {name} in {self.store}"
            raise CheckpointError(f"{where} is incomplete or damaged: {MANIFEST}: {error}") from error
        return manifest


def _facts_in(name: str, manifest: Mapping[str, Any]) -> CheckpointFacts:
    return CheckpointFacts(name, **{field: manifest[field] for field in _NUMBERS}, best=tuple(manifest["best"]))


class CheckpointWriter:
    """Writes checkpoints on its own thread, one after the other, and keeps the newest ones.

    A checkpoint that cannot be written is logged and shown by `notify`, and training continues; `drain` raises the
    error of the last one. While a write takes longer than `patience_s`, nobody waits for it: a checkpoint in the queue
    behind it gives way to the next one, unless it is the best by a followed value and the next one is not.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        keep: int,
        notify: Callable[[str], None] = lambda text: None,
        now: Callable[[], float] = clock.monotonic,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._checkpoints = checkpoints
        self._patience_s = patience_s
        self._keep = keep
        self._notify = notify
        self._now = now
        self.fenced: RunTakenError | None = None  # set once another driver has the run: nothing more is written
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, ...], tuple[int, Callable[[], Contents]]] = {}
        """By the values of which it is the best: the step and the contents. In the order of their submission."""
        self._writing: tuple[int, float] | None = None  # the step, and when the write began
        self._next_notice_s = SLOW_S
        self._closed = False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        """True if a checkpoint that is submitted now would have to wait."""
        return bool(self._waiting) or self._writing is not None

    def submit(self, contents: Callable[[], Contents], step: int = 0, best: tuple[str, ...] = ()) -> None:
        """Queue a checkpoint, whose contents are made on the writer's thread."""
        with self._changed:
            # nobody waits for a write that takes long
            while best in self._waiting and (
                self._writing is None or self._now() - self._writing[1] < self._patience_s
            ):
                self._changed.wait(0.1)
            left_out = self._waiting.pop(best, None)
            self._waiting[best] = (step, contents)
            self._changed.notify_all()
        if left_out is not None:
            log.warning("the checkpoint of step %d is left out: the one before is still being written", left_out[0])
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="spark-elastic-checkpoints", daemon=True)
            self._thread.start()

    def watch(self) -> None:
        """Show that a write takes long. To be called again and again while others work or wait."""
        step, since = self._writing or (0, self._now())
        if (seconds := self._now() - since) >= self._next_notice_s:
            self._next_notice_s = 2 * seconds
            self._notify(
                f"the checkpoint of step {step} has been being written to {self._checkpoints.store} for "
                f"{seconds:.0f} s; training continues"
            )

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until all checkpoints are written. Raises `CheckpointError` if the last one was not, or timely."""
        deadline = None if timeout_s is None else self._now() + timeout_s
        with self._changed:
            while self.busy and (deadline is None or self._now() < deadline):
                self._changed.wait(1.0)
                self.watch()
            if self.busy:
                raise CheckpointError(
                    f"the last checkpoint was not written to {self._checkpoints.store} within {timeout_s:.0f} s; the "
                    "training ends without it"
                )
        if self._error is not None:
            raise CheckpointError(f"the last checkpoint could not be written: {self._error}") from self._error

    def close(self) -> None:
        """Finish the queued checkpoints and end the thread, unless the storage hangs."""
        if self._thread is not None:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                self._waiting.clear()
                log.warning("a checkpoint is still being written to %s; it is left", self._checkpoints.store)
            self._thread = None

    def _next(self) -> Callable[[], Contents] | None:
        """Wait for a checkpoint to write; None after `close`."""
        with self._changed:
            self._writing = None
            self._changed.notify_all()
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
            step, make = self._waiting.pop(next(iter(self._waiting)))
            self._writing, self._next_notice_s = (step, self._now()), SLOW_S
            return make

    def _work(self) -> None:
        failing = keeps_all = False
        while (make := self._next()) is not None:
            try:
                self._checkpoints.write(make())
                self._error = None
                if failing:
                    self._notify("checkpoints can be written again")
                failing = False
                try:
                    self._checkpoints.keep(self._keep)
                    keeps_all = False
                except RunTakenError:
                    raise
                except Exception as error:  # a storage in which a file is written once, say
                    log.warning("older checkpoints could not be removed: %s", redacted(error))
                    if not keeps_all:
                        why = class_and_first_line(error)
                        self._notify(f"older checkpoints could not be removed, and stay ({why}); training continues")
                    keeps_all = True
            except RunTakenError as error:
                self._error = self.fenced = error
            except Exception as error:  # a failure of the storage must not end the training
                self._error = error
                log.exception("a checkpoint could not be written; training continues")
                if not failing:
                    why = class_and_first_line(error)
                    self._notify(f"a checkpoint could not be written ({why}); training continues")
                failing = True

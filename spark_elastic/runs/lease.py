"""The lease of a driver on a run: one driver at a time writes in its folder, and renews the lease with heartbeats.

::

    <run>/owners/<token>-<id>.json    the owner, since when, and a counter of its heartbeats

Each driver that takes the run has a larger token than all before it, and checkpoints carry the token. A driver whose
lease was taken over, because it was paused for too long, finds a larger token, and so do its workers before they write.

A driver takes the lease by writing its file and then listing the others. It withdraws if it finds a rival with the same
or a larger token. Of two that write at the same time, the later one sees both files, so at most one succeeds. This
needs no atomic rename, and works on local folders, HDFS, and object stores whose listings show what was written (S3,
GCS, ABFS). A write that was checked just before a take-over may still arrive after it: such a checkpoint has a
different name, and counts as older than all checkpoints of the new driver.

If the folder is not there at all, it was deleted, or its storage is away for a moment, such as a network share whose
server starts again. Nothing is written then, so that a deleted run does not come back in parts and nothing lands in the
empty folder below a mount; the training goes on, and the driver gives the run up after `LEASE_S`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from spark_elastic import clock
from spark_elastic.data.store import Store
from spark_elastic.errors import RunTakenError
from spark_elastic.redaction import redacted

OWNERS = "owners"
BEAT_S = 10.0
LEASE_S = 60.0  # a driver without a heartbeat for this time may be replaced
WATCH_S = 2.5 * BEAT_S  # a lease is watched as long before it is taken over, because the clocks of two hosts may differ
_POLL_S = 0.5
_MAX_RIVALS = 8
_JSON_TYPES = {"float": ("float", "int")}
_FILE = re.compile(r"(\d{6,})-([0-9a-f]{32})\.json")

log = logging.getLogger("spark_elastic.runs")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """The identity of a process, unique among all processes of all hosts.

    `machine` is host, boot id and process namespace; `started` is in clock ticks since the boot, see `started_of`.
    """

    host: str
    machine: str
    pid: int
    started: int
    program: str

    @classmethod
    def this(cls) -> ProcessIdentity:
        host = socket.gethostname()
        boot = _text(Path("/proc/sys/kernel/random/boot_id").read_text)
        machine = ":".join([host, boot, _text(lambda: os.readlink("/proc/self/ns/pid"))])
        return cls(host, machine, os.getpid(), started_of(os.getpid()), sys.argv[0] if sys.argv else "")

    def is_dead(self, seen_from: ProcessIdentity) -> bool:
        """Return whether its own machine sees that the process has ended; hidden processes count as alive."""
        if self.machine != seen_from.machine:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # a process of another user
            pass
        return started_of(self.pid) not in (0, self.started)


@dataclass(frozen=True, slots=True)
class Owner:
    """The driver that holds, or held, a run, as its file says, with the number of its heartbeats.

    `since` and `beat_at`, the last heartbeat, are seconds since 1970 by its clock.
    """

    token: int
    name: str
    process: ProcessIdentity
    since: float
    beat: int
    beat_at: float
    released: bool = False

    def dumps(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def loads(cls, text: bytes) -> Owner:
        """Parse what `dumps` returned. Raises `ValueError` for anything else."""
        try:
            document = json.loads(text)
            owner = cls(**{**document, "process": ProcessIdentity(**document["process"])})
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not an owner: {error!r}") from error
        for each in (owner, owner.process):
            for field in fields(each):
                value, wanted = getattr(each, field.name), str(field.type)
                if type(value).__name__ not in _JSON_TYPES.get(wanted, (wanted,)):
                    raise ValueError(f"{field.name} must be of type {wanted}, not {value!r:.40}")
        return owner

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        program = f" ({self.process.program})" if self.process.program else ""
        return f"the driver with pid {self.process.pid} on {self.process.host}{program}, since {since}"


@dataclass(frozen=True, slots=True)
class Fence:
    """The token of a driver's lease. Pickled into trainings, so that workers check it before they write."""

    run: Store
    token: int
    name: str

    def check(self) -> None:
        """Raise `RunTakenError` if another driver has taken over the run, and `RunMissingError` if it is not there."""
        names = _names(self.run)
        later = [name for name in names if _token(name) >= self.token and name != self.name]
        if later:
            taken = _read(self.run, later[-1])
            by = f" by {taken}" if taken else ""
            raise RunTakenError(
                f"this driver's lease on the run in {self.run.url} was taken over{by}; this driver sent no heartbeat "
                f"for more than {LEASE_S:.0f} s (paused, or cut off from the storage), and stops so that it overwrites "
                "nothing. The other driver continues the run; start this one again once that has ended"
            )
        if self.name not in names:
            raise RunMissingError(f"the run in {self.run.url} is not there: it was deleted, or its storage is away")


class RunMissingError(FileNotFoundError):
    """The folder of a run that this driver holds is not there. Nothing is written, and it may come back."""


class RunLease:
    """The lease of this process on a run, which its thread renews until the folder is away for `patience_s`."""

    def __init__(self, run: Store, owner: Owner, beat_s: float, patience_s: float = LEASE_S) -> None:
        self.fence = Fence(run, owner.token, owner.name)
        self._run = run
        self._owner = owner
        self._beat_s = beat_s
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._lost: RunTakenError | None = None
        self._there_at = clock.monotonic()  # when the run's folder was there last
        self._on_taken: Callable[[str], None] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="spark_elastic run lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `RunTakenError` if another driver has taken over the run."""
        if self._lost is not None:
            raise self._lost
        self.fence.check()

    @contextmanager
    def on_taken(self, callback: Callable[[str], None]) -> Iterator[None]:
        """Call `callback(reason)` if another driver takes the run in the block, which ends with `RunTakenError`."""
        with self._lock:
            self._on_taken = callback
            lost = self._lost
        if lost is not None:
            callback(str(lost))
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):  # the storage does not answer: raise the error of the block
                try:
                    self.check()
                except RunTakenError as taken:
                    raise taken from error
            raise
        finally:
            with self._lock:
                self._on_taken = None

    def give_back(self) -> None:
        """End the lease. The file stays, so that the next token is larger."""
        self._stop.set()
        self._thread.join()
        if self._lost is None:
            try:
                self.fence.check()
                _write(self._run, replace(self._owner, released=True))
            except Exception as error:  # it expires by itself, and this process knows that it is over
                log.info("the lease on %s could not be given back: %s", self._run.url, redacted(error))
        _live.discard(self._owner.name)

    def _keep_beating(self) -> None:
        while not self._stop.wait(self._beat_s):
            try:
                self.fence.check()
                self._owner = replace(self._owner, beat=self._owner.beat + 1, beat_at=clock.wall())
                _write(self._run, self._owner)
                self._there_at = clock.monotonic()
            except RunTakenError as error:
                self._end(error)
                return
            except RunMissingError as error:
                missing_s = clock.monotonic() - self._there_at
                if missing_s > self._patience_s:
                    self._end(RunTakenError(f"{error}. After {missing_s:.0f} s this driver gives it up"))
                    return
                log.warning("the run in %s is not there; training continues without checkpoints", self._run.url)
            except Exception as error:  # tried again at the next heartbeat
                log.warning("the lease on the run in %s could not be renewed: %s", self._run.url, redacted(error))

    def _end(self, error: RunTakenError) -> None:
        with self._lock:
            self._lost, callback = error, self._on_taken
        log.warning("%s", error)
        if callback is not None:
            callback(str(error))


_live: set[str] = set()  # names of the leases of this process that have not ended, whatever their files say


@contextmanager
def opened_run(run: Store, known_token: int = 0) -> Iterator[RunLease]:
    """Hold the run while the block runs, and remove files that killed drivers have not completed.

    `known_token` is the largest token in the run's checkpoints. Raises `RunTakenError`, naming the other driver, if one
    holds it.
    """
    lease = RunLease(run, acquire(run, known_token), BEAT_S)
    try:
        lease.check()
        run.delete_unfinished()
        yield lease
    finally:
        lease.give_back()


def acquire(
    run: Store,
    known_token: int = 0,
    *,
    me: ProcessIdentity | None = None,
    wall: Callable[[], float] = clock.wall,
    monotonic: Callable[[], float] = clock.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Owner:
    """Take the run once it is free, or its owner was silent for `LEASE_S`. Raise `RunTakenError` if a driver has it."""
    me = ProcessIdentity.this() if me is None else me
    watched: dict[str, tuple[Owner | None, float]] = {}

    def is_free(name: str) -> bool:
        """Return whether the newest lease has ended. Raises `RunTakenError` if its owner is alive."""
        found, now = _read(run, name), monotonic()
        if found is not None and (found.released or found.process.is_dead(me)):
            return True
        if found is not None and (found.process.machine, found.process.pid) == (me.machine, me.pid):
            if name not in _live:  # it ended, but the storage did not accept its last write
                return True
            raise _taken(run, found, wall())
        if name not in watched:
            watched[name] = (found, now)
            log.warning(
                "the run in %s was taken by %s; waiting up to %.0f s for a heartbeat before it is taken over",
                run.url,
                found or "another driver",
                _patience_s(found, wall()),
            )
        first, since = watched[name]
        if found is not None and first is not None and found.beat != first.beat:
            raise _taken(run, found, wall())
        return now - since >= _patience_s(first, wall() - (now - since))

    rivals = 0
    while True:
        name = next(reversed(_names(run)), None)
        if name is not None and not is_free(name):
            pause(_POLL_S)
            continue
        token = max(known_token, _token(name or "0")) + 1
        mine = Owner(token, f"{token:06d}-{uuid.uuid4().hex}.json", me, wall(), 0, wall())
        _live.add(mine.name)
        with contextlib.ExitStack() as withdrawal:
            withdrawal.callback(_live.discard, mine.name)
            _write(run, mine)
            others = [other for other in _names(run) if other != mine.name]
            if all(_token(other) < token for other in others):
                for other in others:
                    run.delete(f"{OWNERS}/{other}")
                withdrawal.pop_all()
                return mine
            run.delete(f"{OWNERS}/{mine.name}")
        rivals += 1
        if rivals == _MAX_RIVALS:
            raise RunTakenError(f"several drivers try to take the run in {run.url} at the same time; start one of them")
        pause(random.uniform(0.1, 2.0))


def _patience_s(found: Owner | None, wall: float) -> float:
    """Return how long to watch a lease that was found at `wall`."""
    return LEASE_S if found is None else max(WATCH_S, min(LEASE_S, LEASE_S - (wall - found.beat_at)))


def _taken(run: Store, owner: Owner, wall: float) -> RunTakenError:
    return RunTakenError(
        f"the run in {run.url} is held by {owner}, last heard of {max(0.0, wall - owner.beat_at):.0f} s ago. Wait for "
        "it to end, or end it, and start again; or give another run_id, which trains beside it. A killed driver "
        f"is replaced at once by one on its host, and after {LEASE_S:.0f} s by any other"
    )


def _names(run: Store) -> list[str]:
    names = [entry.path.rpartition("/")[2] for entry in run.list(OWNERS) if not entry.is_dir]
    return sorted((name for name in names if _FILE.fullmatch(name)), key=lambda name: (_token(name), name))


def _token(name: str) -> int:
    return int(name.partition("-")[0])


def _read(run: Store, name: str) -> Owner | None:
    """Return the owner in a file; None if the file is gone, or holds something else."""
    try:
        return Owner.loads(run.read_bytes(f"{OWNERS}/{name}"))
    except (ValueError, FileNotFoundError):
        return None


def _write(run: Store, owner: Owner) -> None:
    run.write_bytes(f"{OWNERS}/{owner.name}", owner.dumps(), durable=False)


def started_of(pid: int) -> int:
    """Return the start of a process in ticks since the boot; 0 if there is no such process, or no /proc."""
    stat = _text(Path(f"/proc/{pid}/stat").read_text)
    after_name = stat.rpartition(")")[2].split()
    return int(after_name[19]) if len(after_name) > 19 else 0


def _text(read: Callable[[], str]) -> str:
    try:
        return read().strip()
    except OSError:
        return ""

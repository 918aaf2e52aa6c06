"""Write what a training has come to, and do not give up at once: it has taken hours, and a storage comes back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from spark_elastic import clock
from spark_elastic.errors import InvalidSettingsError, RunTakenError

if TYPE_CHECKING:
    from spark_elastic.data.store import Store

log = logging.getLogger("spark_elastic.ml")

SETTING = "SPARK_ELASTIC_SAVE_TIMEOUT"
"""Environment variable of the workers: for how many seconds the files are tried."""
TRY_S = 300.0
"""Unless told otherwise: a failover of HDFS takes a minute, and a person can make room on a full disk."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Between two tries; the last one again and again."""
TELL_EVERY_S = 30.0


def timeout_s(environment: Mapping[str, str]) -> float:
    """Raises: InvalidSettingsError: not a time."""
    text = environment.get(SETTING, "")
    try:
        seconds = float(text or TRY_S)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidSettingsError(f"{SETTING} must be seconds, from 0, not {text!r}")
    return seconds


class Saving:
    """Writes files on a thread of its own; those that the store would not have are in `left`.

    Args:
        make: the files by name, in the order in which they are written.
        check: raises if this process must not write any more; that is not tried again.
        tell: says something to people.
        try_s: seconds after which a file is left.
        wait: waits so many seconds, less if the saving is to stop; returns whether it is.
    """

    def __init__(
        self,
        store: Store,
        make: Callable[[], Mapping[str, bytes]],
        check: Callable[[], None],
        tell: Callable[[str], None],
        *,
        try_s: float = TRY_S,
        now: Callable[[], float] = clock.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self.left: dict[str, bytes] = {}
        self._store = store
        self._make = make
        self._check = check
        self._tell = tell
        self._try_s = try_s
        self._now = now
        self._stop = threading.Event()
        self._wait = self._stop.wait if wait is None else wait
        self._error: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark_elastic-saving", daemon=True)
        self._thread.start()

    def over(self, timeout_s: float) -> bool:
        """Wait for the end. Returns: whether it has come. Raises: what `check` has raised, or what `make` has."""
        over = self._over.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return over

    def close(self) -> None:
        self._stop.set()
        self._over.wait()

    def _run(self) -> None:
        try:
            until = self._now() + self._try_s
            for file, data in self._make().items():
                if not self._written(file, data, until):
                    self.left[file] = data
        except Exception as error:  # for those who wait
            self._error = error
        finally:
            self._over.set()

    def _written(self, file: str, data: bytes, until: float) -> bool:
        told_at, tries = -TELL_EVERY_S, 0
        while True:
            self._check_or_pass()
            try:
                self._store.write_bytes(file, data)
            except Exception as error:  # each kind of storage has its own
                left_s = until - self._now()
                why = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
                where = f"{file} could not be written to {self._store.url} ({why})"
            else:
                if tries:
                    self._tell(f"{file} is written to {self._store.url} after all")
                return True
            if left_s <= 0:
                tried = _in_words(self._try_s)
                self._tell(f"{where}, not for {tried}; the driver gets it in the results of the job instead")
                return False
            if until - left_s - told_at >= TELL_EVERY_S or not tries:
                told_at = until - left_s
                self._tell(f"{where} and is tried again, for {_in_words(left_s)} more; then the driver gets it instead")
            if self._wait(min(PAUSES_S[min(tries, len(PAUSES_S) - 1)], left_s)):
                return False
            tries += 1

    def _check_or_pass(self) -> None:
        try:
            self._check()
        except RunTakenError:
            raise
        except Exception as error:  # each kind of storage has its own: it cannot be asked, and so not written to either
            log.info("whose run %s is cannot be told: %s", self._store.url, error)


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"

"""What became of hostile inputs: opened, refused with a short error of this package, or a problem."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_elastic.errors import SparkElasticError

LONGEST_ERROR = 5000
"""Characters. An error that repeats a whole hostile document is not a clear one."""


@dataclass
class Findings:
    """What became of the files of one kind."""

    opened: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Errors of this package, by class."""
    bare: Counter[str] = field(default_factory=Counter)
    """Other errors, by class, message and the line that raised them."""
    unclear: Counter[str] = field(default_factory=Counter)
    """Errors of this package that are much too long."""
    growth_mib: float = 0.0
    threads: int = 0
    descriptors: int = 0

    def judge(self, call: Callable[[], object]) -> None:
        """Call, and count what has become of it: only errors of this package are allowed, and short ones."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                call()
            self.opened += 1
        except SparkElasticError as error:
            self.refused[type(error).__name__] += 1
            if len(str(error)) > LONGEST_ERROR:
                self.unclear[f"{type(error).__name__} of {LONGEST_ERROR} characters or more: {error!s:.100}"] += 1
        except Exception as error:
            self.bare[described(error)] += 1

    def note_growth(self, before: tuple[float, int, int], after: tuple[float, int, int]) -> None:
        """Note the difference between two results of `usage`."""
        self.growth_mib = round(after[0] - before[0], 3)
        self.threads, self.descriptors = after[1] - before[1], after[2] - before[2]

    def problems(self) -> list[str]:
        left = [f"{self.threads} threads are left"] * (self.threads > 0)
        left += [f"{self.descriptors} descriptors are left"] * (self.descriptors > 0)
        return left + [f"{count} times: {text}" for text, count in (self.bare + self.unclear).items()]

    def summary(self) -> str:
        refused = f"{self.refused.total()} refused, {self.opened} opened, {self.bare.total()} bare errors"
        return f"{refused}, {self.growth_mib:.1f} MiB of growth"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "refused": dict(self.refused), "bare": dict(self.bare), "unclear": dict(self.unclear)}


def described(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/spark_elastic/" in frame.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "elsewhere"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''!s:.80} at {where}"[:200]


def usage() -> tuple[float, int, int]:
    """Return the resident memory in MiB, the threads and the descriptors of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), len(os.listdir("/proc/self/fd"))

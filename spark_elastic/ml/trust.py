"""Whether files of others may run code when they are loaded, and which versions of PyTorch and Keras keep them from it.

A caller grants it, or a deployment by the environment variable `SPARK_ELASTIC_TRUST`, where nobody can pass an argument
to what loads the model (`mlflow.pyfunc`). It holds folders, parted by commas, or the word `all`, and is read in the
process that loads.

A loader that is called safe is so from some version on only: before, a file could run code in spite of
`weights_only=True` (PyTorch) or `safe_mode=True` (Keras). With an older version nothing is loaded without trust.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spark_elastic.errors import CheckpointError

_trusted: contextvars.ContextVar[bool] = contextvars.ContextVar("spark_elastic_trusted", default=False)

TRUST_VARIABLE = "SPARK_ELASTIC_TRUST"
_ALL = "all"
TRUST = (
    "If you trust whoever wrote it, use load(path, trusted=True), or `with "
    "spark_elastic.ml.persistence.trusted_files():` around PipelineModel.load and the like; a deployment that cannot, "
    f"such as mlflow.pyfunc, sets the environment variable {TRUST_VARIABLE} to the folder"
)


@contextlib.contextmanager
def trusted_files(trusted: bool = True) -> Iterator[None]:
    """Within this, saved estimators and models may run the code that they name when they are loaded."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    """Return whether the caller trusts the files, whatever they say of themselves."""
    return _trusted.get()


def granted(path: str, qualified: Callable[[str], str]) -> bool:
    """Return whether the deployment trusts what lies at this path.

    qualified: makes a whole URI of a path, without "..", so that "/models" and "file:///models" are one place.
    """
    named = [each.strip() for each in os.environ.get(TRUST_VARIABLE, "").split(",") if each.strip()]
    if _ALL in named:
        return True
    if not named:
        return False
    place = qualified(path).rstrip("/") + "/"
    return any(place.startswith(qualified(folder).rstrip("/") + "/") for folder in named)


@dataclass(frozen=True, slots=True)
class SafeFrom:
    """The oldest version of a package whose restricted loader cannot be made to run code, and what is known of those
    before it."""

    package: str
    version: tuple[int, ...]
    flaws: str

    def check(self, installed: str) -> None:
        """Refuse to load a file of others with an older version, unless files are trusted.

        Raises: CheckpointError: naming both versions.
        """
        if is_trusted() or _numbers(installed) >= self.version:
            return
        oldest = ".".join(map(str, self.version))
        raise CheckpointError(
            f"{self.package} {installed} is installed, whose restricted loader can be made to run code by the file "
            f"({self.flaws}), so nothing is loaded with it that is not trusted: pip install "
            f"'{self.package}>={oldest}'. {TRUST}"
        )


TORCH = SafeFrom("torch", (2, 6), "CVE-2025-32434")
KERAS = SafeFrom("keras", (3, 11, 3), "CVE-2025-1550, CVE-2025-8747, CVE-2025-9906")


def _numbers(version: str) -> tuple[int, ...]:
    """Of "2.5.1+cpu": (2, 5, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version, maxsplit=1)[0]))

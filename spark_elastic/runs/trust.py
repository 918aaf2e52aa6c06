"""Trust in files: whether loading a file may run code, and which versions of PyTorch and Keras can prevent it.

The caller of a loader grants trust. Where no argument can be passed to the loader (`mlflow.pyfunc`), a deployment
grants it by the environment variable `SPARK_ELASTIC_TRUST` of the loading process: folders, separated by commas, or the
word `all`.

The restricted loaders are safe from some version on only: before, a file could run code, or read other files, in spite
of `weights_only=True` (PyTorch) or `safe_mode=True` (Keras). With older versions nothing is loaded without trust.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from spark_elastic.errors import CheckpointError

_trusted: contextvars.ContextVar[bool] = contextvars.ContextVar("spark_elastic_trusted", default=False)

TRUST_VARIABLE = "SPARK_ELASTIC_TRUST"
_ALL = "all"
TRUST = (
    "If you trust its author, use load(path, trusted=True), or `with "
    "spark_elastic.trusted_files():` around PipelineModel.load and the like; where neither is possible, "
    f"as with mlflow.pyfunc, set the environment variable {TRUST_VARIABLE} to the folder"
)


@contextlib.contextmanager
def trusted_files(trusted: bool = True) -> Iterator[None]:
    """Let saved estimators and models run the code that they name when they are loaded within the block."""
    token = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(token)


def is_trusted() -> bool:
    """Return whether the caller trusts the files that are being loaded."""
    return _trusted.get()


def granted(path: str, qualified: Callable[[str], str]) -> bool:
    """Return whether the deployment trusts the files at this path; `qualified` makes a full URI of a path."""
    named = [each.strip() for each in os.environ.get(TRUST_VARIABLE, "").split(",") if each.strip()]
    if _ALL in named:
        return True
    if not named:
        return False
    places = [_components(each) for each in _readings(qualified(path))]
    folders = [_components(qualified(folder)) for folder in named]
    return any(all(place[: len(folder)] == folder for place in places) for folder in folders)


def _readings(url: str) -> set[str]:
    """Return a URI as each filesystem may read it: with `%2e` decoded or not, up to a "?" or with it."""
    found = {url}
    while (decoded := unquote(url)) != url:
        url = decoded
        found.add(url)
    return found | {re.split(r"[?#]", each, maxsplit=1)[0] for each in found}


def _components(url: str) -> tuple[str, ...]:
    """Return scheme, authority and the folders of a path, without "." and ".."; of this machine also without links."""
    scheme, colon, rest = url.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        scheme, rest = "file", url
    authority = ""
    if rest.startswith("//"):
        authority, _, rest = rest[2:].partition("/")
    path = posixpath.normpath(f"/{rest.lstrip('/')}")
    if scheme.lower() == "file":
        path = os.path.realpath(path)
    return (scheme.lower(), authority, *path.strip("/").split("/"))


@dataclass(frozen=True, slots=True)
class SafeFrom:
    """The oldest version whose restricted loader runs no code. Older and `flawed` ones have the `flaws`."""

    package: str
    version: tuple[int, ...]
    flaws: str
    flawed: tuple[str, ...] = ()

    def check(self, installed: str) -> None:
        """Raise `CheckpointError`, naming both versions, if the version is not safe and files are not trusted."""
        numbers = re.findall(r"\d+", re.split(r"[^\d.]", installed, maxsplit=1)[0])  # of "2.5.1+cpu": 2, 5 and 1
        if is_trusted() or (tuple(map(int, numbers)) >= self.version and installed not in self.flawed):
            return
        oldest = ".".join(map(str, self.version))
        raise CheckpointError(
            f"{self.package} {installed} is installed, whose restricted loader can be made to run code, or to read "
            f"other files, by the file ({self.flaws}), so it loads only trusted files: pip install "
            f"'{','.join([f'{self.package}>={oldest}', *(f'!={each}' for each in self.flawed)])}'. {TRUST}"
        )


TORCH = SafeFrom("torch", (2, 6), "CVE-2025-32434")
KERAS = SafeFrom(
    "keras",
    (3, 12, 1),
    "CVE-2025-1550, CVE-2025-8747, CVE-2025-9906, CVE-2025-12058, CVE-2026-1669",
    ("3.13.0", "3.13.1"),
)

"""Links of Markdown pages, rewritten for places where the repository's folders are not beside the page.

The pages link to one another and to files of the repository by relative paths. On a package index all of them have to
be absolute; on the site those to files that are not part of it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_PARTS = re.compile(
    r"(?P<code>^(?P<fence>`{3,}).*?^(?P=fence)`*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<before>!?\[(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*\]\()(?P<target>[^)\s]+)(?P<after>[^)]*\))",
    re.MULTILINE | re.DOTALL,
)
"""Code, which stays as it is, or a link: `[text](target "title")`, also around an image with its own target."""
_LINK_IN_TEXT = re.compile(r"(!\[[^\]]*\]\()([^)\s]+)")


def repository() -> str:
    """Return the address of the repository, which pyproject.toml declares."""
    found = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def rewritten(text: str, target_of: Callable[[str], str]) -> str:
    """Return the page with each relative target of a link or image replaced by what `target_of` returns for it."""

    def replaced(found: re.Match[str]) -> str:
        if found["code"] is not None:
            return found[0]
        before = _LINK_IN_TEXT.sub(lambda image: image[1] + new(image[2]), found["before"])
        return before + new(found["target"]) + found["after"]

    def new(target: str) -> str:
        return target if re.match(r"[a-z]+:|#", target) else target_of(target)

    return _PARTS.sub(replaced, text)


def in_repository(page: str, target: str) -> tuple[str, str]:
    """Return (path from the root, '#anchor' or '') of a relative target.

    Args:
        page: Path of the page that has the link, from the root of the repository.
        target: The link's target, relative to that page.

    Raises:
        FileNotFoundError: the repository has no such file.
    """
    path, hash, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"{page} links to {target}, and the repository has no {path}")
    return path, hash + anchor


def absolute(page: str, target: str, version: str) -> str:
    """Return the address of a relative target in the repository, as it was at the tag of `version`."""
    path, anchor = in_repository(page, target)
    kind = "raw" if Path(path).suffix in (".png", ".svg") else "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository()}/{kind}/{version}/{path}{anchor}"


def readme_for_an_index(version: str) -> str:
    """Return README.md for a package index: absolute links to the files of that version, without HTML comments."""
    text = (ROOT / "README.md").read_text()
    text = rewritten(text, lambda target: absolute("README.md", target, f"v{version}"))
    return re.sub(r"^<!--.*?-->\n", "", text, flags=re.MULTILINE | re.DOTALL)

"""The pages that people read, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "recipes").glob("*.md"))]

LANGUAGES = {"python", "sh", "text", "mermaid"}
"""What a block may say that it is. Text is output; the rest is checked, or run."""

_FENCE = re.compile(r"^```(?P<language>[\w-]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>[^>]+) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """line: of the file, where its code begins. not_run: why it is shown only, if it is."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*languages: str) -> Iterator[Block]:
    """The fenced blocks of all pages, in order; of these languages, if any are named."""
    for page in PAGES:
        text = page.read_text()
        for found in _FENCE.finditer(text):
            before = text[: found.start()]
            marked = _NOT_RUN.search(before)
            line = before.count("\n") + 2
            if not languages or found["language"] in languages:
                yield Block(page, line, found["language"], found["code"], marked["why"] if marked else None)

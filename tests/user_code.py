"""The programs that users copy: the recipes of `docs/recipes`, block by block, and the notebooks of `examples`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.pages import DOCS, ROOT, blocks

NOTEBOOKS = ROOT / "examples" / "notebooks"


def programs() -> Iterator[tuple[str, str]]:
    """Yield each program as (file name, code)."""
    for block in blocks("python"):
        if block.page.parent == DOCS / "recipes" and block.not_run is None:
            yield f"{block.page.stem}_line_{block.line}.py", block.code
    for path in sorted(NOTEBOOKS.glob("[0-9]*.py")):
        yield f"notebook_{path.name}", path.read_text()


def write(folder: Path) -> None:
    for name, code in programs():
        (folder / name).write_text(code)

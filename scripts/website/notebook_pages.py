"""Executed notebooks as Markdown pages with pictures."""

from __future__ import annotations

import base64
import re
from typing import Any

from nbformat import NotebookNode

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STYLE = re.compile(r"<style\b.*?</style>\s*|<script\b.*?</script>\s*", re.DOTALL)


def page(notebook: NotebookNode, stem: str) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook, and its pictures by file name."""
    pictures: dict[str, bytes] = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.cell_type == "code":
            parts.append(_fenced(cell.source, "python"))
            parts += [shown for output in cell.outputs for shown in _output(output, stem, pictures)]
    first, _, rest = "\n\n".join(parts).partition("\n\n")
    files = f"Files: [{stem}.ipynb]({stem}.ipynb), [{stem}.py]({stem}.py)"
    return f"{first}\n\n{files}\n\n{rest}\n", pictures


def _output(output: Any, stem: str, pictures: dict[str, bytes]) -> list[str]:
    data = output.get("data", {})
    if "image/png" in data:
        name = f"{stem}-{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode(data["image/png"])
        return [f'![Output of the cell above]({name}){{ class="output" }}']
    html = data.get("text/html", "")
    if "<table" in html:
        table = " ".join(_STYLE.sub("", html).split())
        return [f'<div class="output">{table}</div>']
    text = output.get("text") or data.get("text/plain", "")
    if output.output_type == "error":
        text = "\n".join(output.traceback)
    text = _ESCAPES.sub("", text).rstrip()
    return [_fenced(text, "text", " .output")] if text else []


def _fenced(text: str, language: str, classes: str = "") -> str:
    attributes = f"{{.{language}{classes}}}" if classes else language
    return f"````{attributes}\n{text}\n````"

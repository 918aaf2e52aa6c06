"""Runs the code of the pages in the present folder: `python page_runner.py OUTCOME.json [page ...]`."""

from __future__ import annotations

import json
import linecache
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from spark_elastic.jobs import start
from tests.pages import Block, blocks

SHELL_TIMEOUT_S = 120.0


def run(block: Block, names: dict[str, Any]) -> None:
    """Raises: whatever the code raises; CalledProcessError: a command failed."""
    if block.language == "sh":
        subprocess.run(["bash", "-euo", "pipefail", "-c", block.code], check=True, timeout=SHELL_TIMEOUT_S)
        return
    code = "\n" * (block.line - 1) + block.code  # so that tracebacks name the line of the page
    where = str(block.page)
    linecache.cache[where] = (len(code), None, block.page.read_text().splitlines(keepends=True), where)
    exec(compile(code, where, "exec"), names)


def main(told: Path, wanted: list[str]) -> int:
    start.in_notebook = lambda: True  # one block runs after the other: workers are kept from one to the next
    outcome: dict[str, str] = {}
    names: dict[str, dict[str, Any]] = {}
    for block in blocks("python", "sh"):
        page = block.page.name
        if block.not_run is not None or (wanted and page not in wanted) or outcome.get(page):
            continue
        began = time.monotonic()
        outcome[page] = f"{block} did not end"  # until it does
        told.write_text(json.dumps(outcome))
        # Functions of a page are sent to workers by value, as those of a program are.
        own = names.setdefault(page, {"__name__": "__main__", "__builtins__": __builtins__})
        try:
            run(block, own)
            outcome[page] = ""
        except (Exception, SystemExit):
            outcome[page] = f"{block}\n{traceback.format_exc()}"
            print(outcome[page], file=sys.stderr, flush=True)
        print(f"== {block} took {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    told.write_text(json.dumps(outcome))
    return 1 if any(outcome.values()) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

"""The site: it is built with `--strict`, holds every page, needs no other server, and has every public name."""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from tests.pages import DOCS, ROOT
from tests.website import api, diagrams

pytestmark = pytest.mark.nightly

ALIASES = {"spark_elastic.tensorflow.keras"}
"""Names of modules that are in the reference under their own name."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", built]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def inventory(site: Path) -> set[str]:
    """The names in the API reference. A name without a docstring is not in it."""
    head, _, packed = (site / "objects.inv").read_bytes().partition(b"using zlib.\n")
    assert b"# Project: spark_elastic\n" in head
    return {line.partition(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}


class Resources(HTMLParser):
    """What a browser loads with a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        source = named.get("src") or (named.get("href") if tag == "link" else None)
        if source and named.get("rel") != "canonical":
            self.loaded.append(source)


@functools.cache
def resources(page: Path) -> Resources:
    return Resources(page)


def pages(site: Path) -> list[Path]:
    found = sorted(site.rglob("*.html"))
    assert len(found) > 50
    return found


def test_the_pages_need_no_other_server(site: Path) -> None:
    loaded = {(page.name, each) for page in pages(site) for each in resources(page).loaded}
    assert len(loaded) > 100
    assert {(page, each) for page, each in loaded if re.match(r"(?:https?:)?//", each)} == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)]*", styles) == []


def test_every_diagram_is_drawn_and_no_other_one(site: Path) -> None:
    wanted = {name for page in DOCS.rglob("*.md") for name in diagrams.of_page(page.read_text())}
    assert {path.stem for path in diagrams.FOLDER.glob("*.svg")} == wanted, "run: make diagrams"
    shown = "".join(page.read_text() for page in pages(site))
    assert all(f'id="diagram-{name}"' in shown for name in wanted)


@pytest.mark.parametrize("module", api.PUBLIC_MODULES)
def test_every_public_name_is_documented(module: str, inventory: set[str]) -> None:
    names = public_names(importlib.import_module(module))
    assert names
    missing = {f"{module}.{name}" for name in names} - ALIASES - inventory
    assert missing == set(), "without a docstring, or not in docs/api"


def public_names(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    own = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    return [name for name, value in own if isinstance(value, type) and value.__module__ == module.__name__]

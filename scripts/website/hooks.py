"""What MkDocs does not do for this site by itself.

- Pages of the repository outside of docs/ (README, CHANGELOG, the notebooks, ...) are part of the site, under their own
  paths, so that relative links lead to them; links to other files of the repository become links to its address.
- `*` in a path of the navigation stands for all files that are not named elsewhere.
- Diagrams are drawn ahead by `scripts/website/diagrams.py`, because Mermaid would come from another server.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

import diagrams
import links
import notebook_pages

log = get_plugin_logger("site")

PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/notebooks/README.md",
    "examples/submit/README.md",
]
"""Pages of the site that are not in docs/, by their paths in the repository."""

FOUND_LAST = ("decisions/", "CHANGELOG", "CONTRIBUTING", "benchmarks")
"""Pages that the search shows after those for users, by how their paths begin."""


def notebooks() -> list[str]:
    return sorted(str(path.relative_to(links.ROOT)) for path in links.ROOT.glob("examples/notebooks/*.ipynb"))


def source_of(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    if uri == "index.md":
        return "README.md"
    if uri in PAGES:
        return uri
    twin = uri.removesuffix(".md") + ".ipynb"
    return twin if twin in notebooks() else f"docs/{uri}"


def uri_of(source: str) -> str | None:
    """Return the page or file of the site for a path in the repository; None: the site has none."""
    if source == "README.md":
        return "index.md"
    if source in PAGES:
        return source
    if source in notebooks():
        return source.removesuffix(".ipynb") + ".md"
    if source.startswith("docs/") and not source.endswith(".py"):
        return source.removeprefix("docs/")
    return None


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.repo_url = links.repository()
    config.repo_name = config.repo_url.split("/", 3)[3]
    config.nav = expanded(config.nav, named(config.nav))
    return config


def named(nav: Any) -> set[str]:
    """Return the paths in the navigation."""
    if isinstance(nav, str):
        return {nav}
    parts = nav.values() if isinstance(nav, dict) else nav
    return {path for part in parts for path in named(part)}


def expanded(nav: Any, taken: set[str]) -> Any:
    """Return the navigation with its patterns replaced by the paths that match, and with the site's own paths."""
    if isinstance(nav, str):
        return uri_of(nav if (links.ROOT / nav).exists() else f"docs/{nav}") or nav
    if isinstance(nav, dict):
        return {title: expanded(part, taken) for title, part in nav.items()}
    parts: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            docs = (str(path.relative_to(links.ROOT / "docs")) for path in (links.ROOT / "docs").rglob("*.md"))
            found = fnmatch.filter([*sorted(docs), *notebooks()], part)
            parts += [expanded(each, taken) for each in found if each not in taken]
        else:
            parts.append(expanded(part, taken))
    return parts


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source in PAGES:
        text = (links.ROOT / source).read_text()
        files.append(File.generated(config, str(uri_of(source)), content=text))
    for source in notebooks():
        uri = str(uri_of(source))
        text, pictures = notebook_pages.page(nbformat.read(links.ROOT / source, as_version=4), Path(source).stem)
        files.append(File.generated(config, uri, content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, posixpath.join(posixpath.dirname(uri), name), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    source = source_of(uri)
    if uri.startswith(FOUND_LAST):
        page.meta["search"] = {"boost": 0.3}

    def target_of(target: str) -> str:
        if source.endswith(".ipynb") and files.get_file_from_path(posixpath.join(posixpath.dirname(uri), target)):
            return target  # a picture that a cell has shown
        try:
            path, anchor = links.in_repository(source, target)
        except FileNotFoundError as error:
            log.warning(str(error))
            return target
        within = uri_of(path + "/README.md") if (links.ROOT / path).is_dir() else uri_of(path)
        if path == source or within is None or files.get_file_from_path(within) is None:
            return links.absolute(source, target, "main")
        return posixpath.relpath(within, posixpath.dirname(uri) or ".") + anchor

    markdown = links.rewritten(markdown, target_of)
    markdown = _pipes_in_code_of_tables(markdown)
    for name, text in diagrams.of_page(markdown).items():
        if not diagrams.file_of(name).exists():
            log.warning("%s has a diagram that is not drawn; run make diagrams:\n%s", source, text)
    return diagrams.replaced(markdown)


def _pipes_in_code_of_tables(markdown: str) -> str:
    """Return the page without backslashes before the pipes of code in tables: Python-Markdown would show them."""
    row = re.compile(r"^\|.*\|$", re.MULTILINE)
    return row.sub(lambda found: re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), found[0]), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return diagrams.drawn(html)

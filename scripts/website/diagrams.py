"""Draws the Mermaid diagrams of the pages, so that the site shows them without a script from another server.

    python scripts/website/diagrams.py    # or make diagrams; needs npm, which fetches Mermaid, and chromium

Each diagram becomes an SVG in docs/images/diagrams, named after the checksum of its text; those that no page has any
more are removed. The site is built from these files.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images" / "diagrams"
SMALLEST = 0.6
"""Of a drawing's own size: its letters are 16 pixels high. What is wider than the page then is scrolled."""
MERMAID = "mermaid@11.17.2"
_BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"<p>diagram:([0-9a-f]{12})</p>")

_PAGE = (
    """<!doctype html><meta charset="utf-8"><body style="font-family: sans-serif"><script src="mermaid.js"></script>"""
)
_DRAW = """
const [texts, done] = arguments;
mermaid.initialize({startOnLoad: false, theme: "neutral", htmlLabels: false, deterministicIds: true,
    fontFamily: "system-ui, sans-serif", flowchart: {htmlLabels: false, useMaxWidth: false},
    state: {useMaxWidth: false}, sequence: {wrap: true, width: 180, useMaxWidth: false}});
(async () => {
    const drawn = {};
    for (const [name, text] of Object.entries(texts)) drawn[name] = (await mermaid.render("diagram-" + name, text)).svg;
    return drawn;
})().then(done, error => done(String(error)));
"""


def name_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def of_page(markdown: str) -> dict[str, str]:
    """Return the diagrams of a page: their texts by name."""
    return {name_of(text): text for text in _BLOCK.findall(markdown)}


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.svg"


def replaced(markdown: str) -> str:
    """Return the page with a place for the drawing instead of each diagram that is drawn."""

    def place(found: re.Match[str]) -> str:
        name = name_of(found[1])
        return f"diagram:{name}\n" if file_of(name).exists() else found[0]

    return _BLOCK.sub(place, markdown)


def drawn(html: str) -> str:
    """Return the page with the drawings in their places, as wide as the page, but never so small that none can read."""
    return _PLACE.sub(lambda found: f'<div class="diagram">{_sized(file_of(found[1]).read_text())}</div>', html)


def _sized(svg: str) -> str:
    width = float(re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+)', svg)[1])  # type: ignore[index]
    opening, end, rest = svg.partition(">")
    opening = re.sub(r' (?:width|height|style)="[^"]*"', "", opening)
    style = f"width: {width:.0f}px; max-width: max(100%, {width * SMALLEST:.0f}px)"
    return f'{opening} style="{style}"{end}{rest}'


def draw(texts: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the drawings of diagrams, as SVG, by name.

    Raises:
        ValueError: Mermaid does not understand one of them.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    for each in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(each)
    driver = webdriver.ChromeService(shutil.which("chromedriver"))  # given, or selenium looks for one elsewhere
    subprocess.run(["npm", "pack", "--silent", MERMAID], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (package,) = folder.glob("*.tgz")
    with tarfile.open(package) as archive:
        script = archive.extractfile("package/dist/mermaid.min.js")
        assert script is not None
        (folder / "mermaid.js").write_bytes(script.read())
    page = folder / "page.html"
    page.write_text(_PAGE)
    with webdriver.Chrome(options, driver) as browser:
        browser.get(page.as_uri())
        found = browser.execute_async_script(_DRAW, texts)
    if isinstance(found, str):
        raise ValueError(found)
    return dict(found)


def main() -> None:
    pages = FOLDER.parents[1].rglob("*.md")
    texts = {name: text for page in pages for name, text in of_page(page.read_text()).items()}
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, svg in draw(texts, Path(folder)).items():
            file_of(name).write_text(svg + "\n")
    for path in FOLDER.glob("*.svg"):
        if path.stem not in texts:
            path.unlink()
    print(json.dumps({name: file_of(name).stat().st_size for name in texts}, indent=4))


if __name__ == "__main__":
    main()

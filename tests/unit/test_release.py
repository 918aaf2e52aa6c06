"""What surrounds a release agrees with it: README on a package index, and versions."""

from __future__ import annotations

import re

import pytest
import yaml
from readme_renderer import markdown

import spark_elastic
from tests.pages import ROOT
from tests.website import links


def test_the_readme_on_a_package_index_has_absolute_links_to_files_that_exist() -> None:
    text = links.readme_for_an_index("1.2.3")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) == len(re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text()))
    base = f"{links.repository()}/"
    inside = [target.removeprefix(base).split("/", 2) for target in targets if target.startswith(base)]
    assert len(inside) > 10
    assert {(kind, tag) for kind, tag, _ in inside} <= {("blob", "v1.2.3"), ("raw", "v1.2.3"), ("tree", "v1.2.3")}
    assert [path for _, _, path in inside if not (ROOT / path.partition("#")[0]).exists()] == []
    assert [target for target in targets if not re.match(r"https?://|#", target)] == []
    assert "<!--" not in text


def test_the_readme_on_a_package_index_is_shown_with_its_picture_tables_and_code() -> None:
    shown = markdown.render(links.readme_for_an_index("1.2.3"))
    assert shown is not None
    sources = re.findall(r'<img[^>]* src="([^"]+)"', shown)
    assert sources
    assert all(source.startswith("https://") for source in sources)
    assert "<table>" in shown
    assert "<pre" in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](b.md)", "[a](<b.md>)"),
        ("![a](b.png)", "![a](<b.png>)"),
        ('[a](b.md "title")', '[a](<b.md> "title")'),
        ("[![a](b.svg)](c.md)", "[![a](<b.svg>)](<c.md>)"),
        ("[a](https://b.c/d) [e](#f) [g](mailto:h)", "[a](https://b.c/d) [e](#f) [g](mailto:h)"),
        ("`x[0](y)` [a](b)", "`x[0](y)` [a](<b>)"),
        ("``a ` b[0](c)`` [a](b)", "``a ` b[0](c)`` [a](<b>)"),
        ("```python\nx[0](y)\n```\n[a](b)", "```python\nx[0](y)\n```\n[a](<b>)"),
    ],
)
def test_links_are_rewritten_but_not_in_code(text: str, expected: str) -> None:
    assert links.rewritten(text, lambda target: f"<{target}>") == expected


def test_a_link_to_a_file_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"README\.md links to docs/no_such\.md"):
        links.absolute("README.md", "docs/no_such.md", "main")


def test_the_newest_version_in_the_changelog_is_the_package_s() -> None:
    versions = re.findall(r"^## \[([^\]]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == spark_elastic.__version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["repository-code"]) == (spark_elastic.__version__, links.repository())

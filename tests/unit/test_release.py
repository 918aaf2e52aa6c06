"""What surrounds a release agrees with it: README on a package index, versions, navigation, workflow, templates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from readme_renderer import markdown

import spark_elastic
from tests.pages import DOCS, ROOT
from tests.website import links


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


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


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    named = list(paths_of(config["nav"]))
    assert len(named) == len(set(named))
    assert config["validation"]["nav"]["omitted_files"] == "warn"  # which --strict makes an error
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | {"README.md", "CHANGELOG.md", "SECURITY.md"}
    missing = [page for page in pages if page not in named and not any(Path(page).match(path) for path in named)]
    assert missing == [], "add it to nav in mkdocs.yml"


def paths_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [path for part in parts for path in paths_of(part)]  # type: ignore[attr-defined]


def test_the_newest_version_in_the_changelog_is_the_package_s() -> None:
    versions = re.findall(r"^## \[([^\]]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == spark_elastic.__version__
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["repository-code"]) == (spark_elastic.__version__, links.repository())


def test_the_addresses_of_the_project_are_within_one_repository() -> None:
    addresses = re.findall(r'"(https://[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(addresses) == 4
    assert all(address.startswith(links.repository()) for address in addresses)


def test_the_workflow_runs_what_is_run_here() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads `on` as a truth value
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == ["bash .ci/run"]
    assert "make lint" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_forms_for_issues_ask_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        return
    assert {"name", "description", "body"} <= set(form)
    asked = [each for each in form["body"] if each["type"] in ("textarea", "dropdown", "input")]
    assert len({each["id"] for each in asked}) == len(asked) > 0
    assert all(each["attributes"]["label"] for each in asked)
    assert any(each.get("validations", {}).get("required") for each in asked)

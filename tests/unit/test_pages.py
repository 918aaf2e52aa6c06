"""What the pages say of the code is true: generated parts, errors, settings, commands, links."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import spark_elastic
from spark_elastic import errors
from spark_elastic.cli import options
from spark_elastic.collective import operations, surface
from tests.pages import DOCS, LANGUAGES, PAGES, ROOT, blocks

ERRORS = (DOCS / "errors.md").read_text()
SOURCES = sorted((ROOT / "spark_elastic").rglob("*.py"))

INTERNAL = {
    "RowsRefused": "the driver makes a DataError of it",
    "LaterLoop": "the elastic loop ends with the result that the others had",
    "Stopped": "ends a thread that reads ahead",
    "NotPlain": "what is not plain is kept as an object",
    "_NeedsTrustError": "the value is pickled instead",
    "_Unexpected": "the decoding of a message raises a ProtocolError instead",
    "RefusedError": "a UsageError that is one of TensorFlow's errors, too",
    "RefusedMismatchError": "a MismatchError that is one of TensorFlow's errors, too",
    "RefusedRequest": "the status page answers with its status code",
    "ScriptExit": "the command exits with the script's own code",
}
"""Exceptions that no user sees, and why. Each is caught inside of the package."""


def test_the_generated_parts_of_the_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))  # as when it is run
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    pages = {page.name: page.read_text() for page in PAGES}
    stale = [name for name, page in pages.items() if generate.generated(page) != page]
    assert stale == [], "run: python docs/generate.py"
    unused = [name for name in generate.PARTS if f"<!-- generated: {name} -->" not in "".join(pages.values())]
    assert unused == []
    drawn = {path.name: path.exists() and path.read_text() == text for path, text in generate.pictures().items()}
    assert drawn == dict.fromkeys(drawn, True), "run: python docs/generate.py"


# --- errors -----------------------------------------------------------------------------------------------------------


def exception_classes() -> dict[str, Path]:
    """Every class of the package that is an exception, by the names of its bases."""
    bases: dict[str, set[str]] = {}
    where: dict[str, Path] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                where[node.name] = path
    found = {name for name, above in bases.items() if {"Exception", "BaseException", "Warning"} & above}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return {name: where[name] for name in found}


def test_every_error_that_a_user_can_meet_is_listed_with_its_cause_and_what_to_do() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", ERRORS, re.MULTILINE)
    names = [name for name, _, _ in listed]
    assert len(names) == len(set(names))
    classes = exception_classes()
    public = {name for name in classes if name not in INTERNAL}
    assert public - set(names) - {"SparkElasticError"} == set(), "not in docs/errors.md"
    assert set(names) - public == set(), "in docs/errors.md, but not in the package"
    assert set(INTERNAL) <= set(classes), "no longer there"


def test_errors_for_users_have_one_home() -> None:
    elsewhere = {name for name, path in exception_classes().items() if path.name != "errors.py"}
    assert elsewhere == set(INTERNAL)


def warnings_of(path: Path) -> Iterator[tuple[str, int]]:
    """The words of each warning, up to where a value is put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        owner = ast.unparse(node.func.value)
        if (owner, node.func.attr) == ("warnings", "warn") or ("log" in owner and node.func.attr in _LOUD):
            words = node.args[0]
            if isinstance(words, ast.Constant) and isinstance(words.value, str):
                yield words.value, node.lineno


_LOUD = ("warning", "error", "exception", "critical")


def test_every_warning_is_listed() -> None:
    missing = []
    for path in SOURCES:
        for words, line in warnings_of(path):
            pieces = [piece.strip(" ;:()") for piece in re.split(r"%[-\d.,]*\w", words)]
            pieces = [piece for piece in pieces if piece]
            # Any of its pieces will do: a message may begin with what it is about.
            if pieces and not any(_listed(piece) for piece in pieces):
                missing.append(f"{path.name}:{line}: {words}")
    assert missing == []


def _listed(piece: str) -> bool:
    section = ERRORS.partition("## Warnings")[2]
    return any(shown in piece for shown in re.findall(r"`([^`]+)`", section) if len(shown) >= 8)


# --- names, settings, commands, links ---------------------------------------------------------------------------------


def names_of(package: str) -> set[str]:
    """Return the names that a framework's package lists, with those of the modules that it exports as a whole."""
    folder = ROOT / "spark_elastic" / package
    paths = [folder.with_suffix(".py"), *(folder / name for name in ("__init__.py", "operations.py"))]
    trees = [ast.parse(path.read_text()) for path in paths if path.exists()]
    assigned = [node for tree in trees for node in tree.body if isinstance(node, ast.Assign)]
    lists = [node.value for node in assigned if "__all__" in ast.unparse(node)]
    return {name for value in lists for name in ast.literal_eval(value)} | {*surface.__all__, *operations.__all__}


def test_what_is_said_to_be_the_same_as_in_horovod_is_there() -> None:
    page = (DOCS / "coming_from.md").read_text().partition("Names within `hvd`")[2].partition("\n\nArguments")[0]
    there = names_of("torch") | names_of("tensorflow") | names_of("keras")
    there |= {f"elastic.{name}" for part in ("torch", "tensorflow", "keras") for name in names_of(f"{part}/elastic")}
    rows = re.findall(r"^\| (.+) \| the same", page, re.MULTILINE)
    same = [name for row in rows for name in re.findall(r"`(\w[\w.]*)`", row)]
    assert len(same) > 40
    assert [name for name in same if name not in there] == []


def test_every_setting_of_run_is_explained() -> None:
    told = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "elasticity.md").read_text(), re.MULTILINE))
    assert set(inspect.signature(spark_elastic.run).parameters) - {"args", "kwargs"} <= told


def test_every_block_says_what_it_is() -> None:
    unknown = [str(block) for block in blocks() if block.language not in LANGUAGES]
    assert unknown == []


def test_diagrams_hold_no_semicolon_which_would_end_a_line_of_theirs() -> None:
    for block in blocks("mermaid"):
        assert re.match(r"flowchart|sequenceDiagram|stateDiagram-v2", block.code), str(block)
        assert ";" not in block.code, str(block)


def test_python_that_is_not_run_is_python() -> None:
    for block in blocks("python"):
        compile(block.code, str(block), "exec")


def commands() -> Iterator[tuple[str, list[str]]]:
    """The arguments of each `spark-elastic` in a block of shell."""
    for block in blocks("sh"):
        for number, line in enumerate(block.code.replace("\\\n", " " * 2).splitlines(), block.line):
            words = shlex.split(line.replace('"$(spark-elastic --submit-file)"', "SUBMIT-FILE"), comments=True)
            for start in ("spark-elastic", "SUBMIT-FILE"):
                if start in words:
                    yield f"{block.page.name}:{number}", words[words.index(start) + 1 :]


def test_commands_in_the_pages_are_understood() -> None:
    parser = options.parser()
    found = list(commands())
    assert found
    for where, words in found:
        if words[:1] == ["doctor"] or {"--help", "--version"} & set(words):
            continue
        try:
            parser.parse(words)
        except SystemExit as exit:
            pytest.fail(f"{where}: {' '.join(words)}: exit {exit.code}")


NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}


def test_the_picture_of_the_readme_shows_what_its_text_counts() -> None:
    head = (DOCS / "images/stormy_run.png").read_bytes()[:4096]
    drawn = re.search(rb"(\d+) epochs, [\d,]+ rows; \d to \d workers, (\d+) lost, (\d+) joined, no step lost", head)
    assert drawn is not None, "the title of the picture, which it carries as text"
    readme = (ROOT / "README.md").read_text()
    described = re.search(r"over (\d+) epochs, [^\]]*: (\w+) are killed and (\w+) join\]", readme)
    below = re.search(
        r"in (\d+) epochs, and a script kills (\w+) of them.*?; (\w+) new ones join\. No step", readme, re.DOTALL
    )
    for said in (described, below):
        assert said is not None
        assert [int(said[1]), NUMBERS[said[2]], NUMBERS[said[3]]] == [int(number) for number in drawn.groups()]


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"https?:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path) if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_leads_to_every_page() -> None:
    found: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in found:
            found.add(page)
            targets = re.findall(r"\]\(([^)\s#:]+\.md)(?:#[^)\s]*)?\)", page.read_text())
            waiting += [(page.parent / target).resolve() for target in targets]
    assert [page.name for page in PAGES if page not in found] == []


def test_the_pages_name_only_files_that_exist() -> None:
    path = re.compile(r"`((?:examples|benchmarks|docs|tests|scripts)/[\w./-]+|[A-Z]+\.md|LICENSE)`")
    named = [(page.name, name) for page in PAGES for name in path.findall(page.read_text())]
    assert named
    assert [name for name in named if not (ROOT / name[1]).exists()] == []


def test_the_package_claims_only_the_frameworks_that_it_has() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    claims = re.findall(r"^(?:description|keywords) = (.*)$", project, re.MULTILINE)
    said = " ".join([*claims, str(spark_elastic.__doc__)]).lower()
    for framework in ("torch", "tensorflow", "keras"):
        has = (ROOT / "spark_elastic" / framework).is_dir()
        assert has == (framework in said), framework


FIGURES = [
    ("README.md", "fit.json", "fit: wall", "takes {:.1f} s", 1),
    ("README.md", "fit.json", "Horovod's TorchEstimator: wall", "TorchEstimator takes {:.1f} s", 1),
    ("README.md", "fit.json", "by hand: wall", "in TorchDistributor {:.1f} s", 1),
    ("README.md", "transform.json", "transform", "puts {:.0f} k rows/s", 1000),
    ("docs/benchmarks.md", "transform.json", "predict_batch_udf, 20-64-2", "same run: {:.0f} /", 1000),
    (
        "docs/benchmarks.md",
        "peers_restart.json",
        "SIGKILL -> next step, spark_elastic, restart",
        "first line again / its next step | 0.53 / {:.2f} s",
        1,
    ),
    ("docs/benchmarks.md", "recovery-worker-processes.json", "worker -> next step, 3 -> 2", "| {:.0f} ms (p99", 1),
    ("docs/benchmarks.md", "start-local-cluster.json", "run -> first step", "| {:.1f} s |", 1),
    (
        "docs/benchmarks.md",
        "recovery-worker-processes-keras.json",
        "worker -> next step, 3 -> 2",
        "3 → 2 / 2 → 1 | {:.0f} /",
        1,
    ),
    ("docs/benchmarks.md", "large-join.json", "4 MB: pause beyond a usual step", "optimizer state | {:.0f} / ", 1),
    ("docs/benchmarks.md", "large-join.json", "100 MB: pause beyond a usual step", " / {:.0f} / 2,101 ms", 1),
    ("docs/benchmarks.md", "large-join.json", "1000 MB: pause beyond a usual step", " / 285 / {:,.0f} ms", 1),
]
"""(page, file of results, series, the words that its median stands in, divided by)."""


@pytest.mark.parametrize(("page", "file", "series", "words", "per"), FIGURES)
def test_figures_in_the_pages_are_those_that_were_measured(
    page: str, file: str, series: str, words: str, per: int
) -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    (median,) = [each["p50"] for each in document["series"] if each["name"] == series]
    text = " ".join((ROOT / page).read_text().split())
    assert words.format(median / per) in text, f"{page}: {words.format(median / per)}"


def test_all_errors_can_be_imported_from_one_module() -> None:
    for name, path in exception_classes().items():
        if path.name == "errors.py":
            assert issubclass(getattr(errors, name), errors.SparkElasticError)

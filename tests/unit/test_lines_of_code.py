"""The count of `benchmarks/lines_of_code.py`: what is a line, and that the table's rows are there."""

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_ruff = pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")


def load():
    spec = importlib.util.spec_from_file_location("lines_of_code", ROOT / "benchmarks" / "lines_of_code.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["lines_of_code"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


lines = load()
PROGRAMS = sorted(lines.PROGRAMS.rglob("*.py"))


def test_blank_lines_and_comments_are_no_lines_of_code():
    assert lines.code_lines("# why\n\nx = 1  # one\n\n\ny = (\n    # inside\n    2\n)\n") == 4


def test_a_string_over_several_lines_is_on_each_of_them():
    assert lines.code_lines('x = """one\n\nthree"""\n') == 3


def test_a_hash_in_a_string_is_no_comment():
    assert lines.code_lines("x = '# text'\n") == 1


@needs_ruff
def test_docstrings_are_not_counted():
    documented = (
        '"""Module."""\n\nclass A:\n    """Class."""\n\n    def f(self):\n        """Method."""\n        return 1\n'
    )
    assert lines.count(documented) == lines.count("class A:\n    def f(self):\n        return 1\n") == 3


@needs_ruff
def test_what_has_only_a_docstring_keeps_a_body():
    assert lines.count('class A:\n    """Nothing else."""\n') == 2
    assert lines.count('"""Nothing else."""\n') == 0


@needs_ruff
def test_the_layout_that_a_call_was_written_in_makes_no_difference():
    exploded = "f(\n    1,\n    b=2,\n)\n"
    assert lines.count(exploded) == lines.count("f(1, b=2)\n") == 1


@needs_ruff
def test_a_call_that_is_too_long_for_a_line_has_a_line_for_each_argument():
    arguments = [f"argument_number_{index}=value_{index}" for index in range(5)]
    assert lines.count(f"function({', '.join(arguments)})\n") == len(arguments) + 2


@needs_ruff
def test_only_statements_that_all_programs_have_are_shared():
    assert lines.shared(["import a\nx = 1\ny = 2\n", "import b\nx = 1  # the same\ny = 3\n"]) == 1


def test_a_recipe_is_the_first_block_under_its_heading(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n## One\n\n```sh\nls\n```\n\n```python\na = 1\n```\n\n```python\nb = 2\n```\n\n## Two\n\ntext\n"
    )
    assert lines.recipe(page, "One") == "a = 1\n"
    with pytest.raises(ValueError, match="no block of Python under '## Two'"):
        lines.recipe(page, "Two")
    with pytest.raises(ValueError, match=r"no heading '## Three'; there are \['One', 'Two'\]"):
        lines.recipe(page, "Three")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_program_of_a_peer_parses_and_uses_that_peer(path):
    imported = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    ]
    assert any(name.startswith(path.parent.name.replace("_", ".")) for name in imported)
    assert not any(name.startswith("spark_elastic") for name in imported)


@pytest.mark.parametrize("task", lines.TASKS, ids=lambda task: task.name)
def test_a_row_has_its_recipe_and_the_same_data_in_all_programs(task):
    programs = lines.sources(task)  # raises if a recipe, a program or a reason is missing
    ours, *others = [ast.parse(program).body for program in programs.values()]
    made = [
        ast.dump(each) for each in ours if ("spark.range" in ast.unparse(each) or "createData" in ast.unparse(each))
    ]
    assert made
    for other in others:
        assert set(made) <= {ast.dump(each) for each in other}


def test_every_program_belongs_to_a_row():
    assert {path.stem for path in PROGRAMS} <= {task.name for task in lines.TASKS}
    assert {path.parent.name for path in PROGRAMS} == set(lines.PEERS)


@needs_ruff
def test_the_result_is_that_of_the_programs_as_they_are():
    document = json.loads(lines.RESULT.read_text())
    assert document["tasks"] == lines.counted(), "run: python benchmarks/lines_of_code.py"
    assert document["runs"] == lines.still_true(document["runs"]), "programs have changed since they were run"


def test_the_note_of_a_run_is_dropped_when_its_program_changes():
    name = f"{PROGRAMS[0].parent.name}/{PROGRAMS[0].stem}"
    note = {"sha256": lines.digest(PROGRAMS[0]), "ran": True}
    assert lines.still_true({name: note}) == {name: note}
    assert lines.still_true({name: {**note, "sha256": "0"}, "ray_train/nothing": note}) == {}


def test_a_program_that_fails_is_noted_with_its_last_line(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit('no such column')\n")
    outcome = lines.run(program, sys.executable)
    assert (outcome["ran"], outcome["error"]) == (False, "no such column")
    program.write_text("import pathlib\nassert not list(pathlib.Path.cwd().iterdir())\n")
    assert lines.run(program, sys.executable) == {"sha256": lines.digest(program), "ran": True}

"""Count the lines that a user writes for the same tasks with spark_elastic and with three peers.

The programs of spark_elastic are the recipes of `docs/recipes`, those of the peers are in `benchmarks/tasks`. Both are
brought into one layout first (no comments, no docstrings, calls joined and then broken at 100 columns by
`ruff format`), so that nobody's line breaks count. Then each line with code on it is one.

::

    python benchmarks/lines_of_code.py                                        # counts
    python benchmarks/lines_of_code.py --run ray_train=ray-env/bin/python     # and runs the programs of a peer

A run notes for each program whether it ended without an error. The note is dropped when the program changes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "benchmarks" / "tasks"
RESULT = ROOT / "benchmarks" / "results" / "lines_of_code.json"
LINE_LENGTH = 100
TIMEOUT_S = 300.0

PEERS = {"xgboost_spark": "xgboost.spark", "horovod": "Horovod Spark estimators", "ray_train": "Ray Train"}
"""The peers: folder in `benchmarks/tasks` -> name in the table."""


@dataclass(frozen=True)
class Task:
    """One row. name: of the peers' files. page, heading: of the recipe. missing: peer -> why it has no program."""

    name: str
    title: str
    page: str
    heading: str
    missing: dict[str, str]


_NO_LAYERS = "trees; there is no network"
TASKS = (
    Task("auc_f1", "AUC and F1 of held-out rows", "metrics.md", "AUC and F1 with torchmetrics", {}),
    Task("class_weights", "class weights", "metrics.md", "Class weights", {}),
    Task(
        "evaluators",
        "`CrossValidator` and Spark's evaluators",
        "metrics.md",
        "Probabilities and rawPrediction in Spark's evaluators",
        {"ray_train": "its trainers are not Spark estimators, so a `CrossValidator` cannot fit them"},
    ),
    Task("embeddings", "ids and numbers", "inputs.md", "Ids and numbers as two inputs, with embeddings", {}),
    Task("tokens", "tokens of variable length", "inputs.md", "Tokens of variable length, with padding", {}),
    Task(
        "keras_inputs",
        "several inputs in Keras",
        "inputs.md",
        "Several inputs in Keras",
        {"xgboost_spark": _NO_LAYERS},
    ),
    Task("warm_start", "warm start", "training.md", "Warm start: go on from a fitted model", {}),
    Task("callback", "callbacks in the workers", "training.md", "A callback of your own", {}),
    Task(
        "driver_callback",
        "a callback on the driver that ends the training",
        "training.md",
        "A callback on the driver",
        {
            "xgboost_spark": "its callbacks run in the workers",
            "horovod": "its callbacks run in the workers, and only those of Keras are called",
            "ray_train": "its `UserCallback` runs in the controller's process, and has no way to end the training",
        },
    ),
    Task("tuning", "tuning with Optuna", "training.md", "Tuning with Optuna", {}),
    Task(
        "export",
        "ONNX, torch.export and TorchScript",
        "serving.md",
        "Export to ONNX, torch.export and TorchScript",
        {"xgboost_spark": _NO_LAYERS},
    ),
    Task("streaming", "predictions of a stream", "serving.md", "Streaming inference", {}),
)


def recipe(page: Path, heading: str) -> str:
    """Return the first block of Python under a `##` heading of a page.

    Raises: ValueError: without such a heading, or without a block of Python before the next one.
    """
    sections = re.split(r"^## +", page.read_text(), flags=re.MULTILINE)[1:]
    for section in sections:
        title, _, text = section.partition("\n")
        if title.strip() == heading:
            found = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
            if found is None:
                raise ValueError(f"{page}: no block of Python under '## {heading}'")
            return found[1]
    titles = [section.partition("\n")[0] for section in sections]
    raise ValueError(f"{page}: no heading '## {heading}'; there are {titles}")


def normal(code: str) -> str:
    """Return the program in one layout: without comments and docstrings, broken at 100 columns.

    Raises:
        SyntaxError: the code is not Python.
        RuntimeError: `ruff` is not installed, or refuses the code.
    """
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and _documented(node):
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(LINE_LENGTH)]
    command += ["--config", "format.skip-magic-trailing-comma=true", "-"]
    done = subprocess.run(command, input=ast.unparse(tree), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ruff format failed: {done.stderr.strip()}")
    return done.stdout


def _documented(node: ast.AST) -> bool:
    return ast.get_docstring(node, clean=False) is not None  # type: ignore[arg-type]


_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(code: str) -> int:
    """Return how many lines have code on them. A string over several lines is on all of them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def count(code: str) -> int:
    """Return the lines of code of a program in its normal layout."""
    return code_lines(normal(code))


def sources(task: Task) -> dict[str, str]:
    """Return the programs of a row: 'spark_elastic' or peer -> code.

    Raises: ValueError: a peer has neither a program nor a reason, or both.
    """
    found = {"spark_elastic": recipe(ROOT / "docs" / "recipes" / task.page, task.heading)}
    for peer in PEERS:
        path = PROGRAMS / peer / f"{task.name}.py"
        if path.exists() == (peer in task.missing):
            raise ValueError(f"{path} must exist, or `missing` must say why it does not, and not both")
        if path.exists():
            found[peer] = path.read_text()
    return found


def shared(programs: list[str]) -> int:
    """Return the lines of the statements at the top level that all programs have, such as those that make the data."""
    trees = [[ast.unparse(statement) for statement in ast.parse(program).body] for program in programs]
    common = [statement for statement in trees[0] if all(statement in other for other in trees[1:])]
    return count("\n".join(common))


def counted() -> list[dict[str, Any]]:
    """Return the rows: task, recipe, lines of each program, lines that all have, reasons for those that are missing."""
    rows = []
    for task in TASKS:
        programs = sources(task)
        rows.append(
            {
                "task": task.name,
                "title": task.title,
                "recipe": f"recipes/{task.page}#{slug(task.heading)}",
                "lines": {who: count(code) for who, code in programs.items()},
                "shared": shared(list(programs.values())) if len(programs) > 1 else None,
                "missing": task.missing,
            }
        )
    return rows


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(path: Path, python: str) -> dict[str, Any]:
    """Run a program in an empty folder; return whether it ended without an error, and its digest."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYSPARK_PYTHON": python, "HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(
            [python, str(path)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nno end after {TIMEOUT_S:.0f} s"
    outcome = {"sha256": digest(path), "ran": process.returncode == 0}
    if process.returncode:
        print(output[-6_000:], file=sys.stderr)
        outcome["error"] = [line for line in output.splitlines() if line.strip()][-1][:200]
    return outcome


_VERSIONS = """
import json, sys
from importlib import metadata
wanted = "pyspark torch ray horovod xgboost tensorflow tensorflow-cpu keras petastorm pyarrow".split()
there = {d.metadata["Name"].lower(): d.version for d in metadata.distributions() if d.metadata["Name"]}
print(json.dumps({"python": sys.version.split()[0], **{name: there[name] for name in wanted if name in there}}))
"""


def still_true(runs: dict[str, Any]) -> dict[str, Any]:
    """Return the notes of runs whose programs have not changed since."""
    paths = {name: PROGRAMS / f"{name}.py" for name in runs}
    return {name: note for name, note in runs.items() if paths[name].exists() and digest(paths[name]) == note["sha256"]}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--run", action="append", default=[], metavar="PEER=PYTHON", help="run a peer's programs")
    arguments.add_argument("--only", metavar="TASK", help="with --run: this task's program only")
    args = arguments.parse_args()
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": {}, "versions": {}}
    runs, versions = still_true(known["runs"]), known["versions"]
    for each in args.run:
        peer, _, python = each.partition("=")
        if peer not in PEERS or not python:
            arguments.error(f"--run {each}: expected PEER=PYTHON, with a peer of {', '.join(PEERS)}")
        told = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
        versions[peer] = json.loads(told.stdout)
        for path in sorted((PROGRAMS / peer).glob("*.py")):
            if args.only in (None, path.stem):
                runs[f"{peer}/{path.stem}"] = run(path, str(Path(python).absolute()))
                print(f"{peer}/{path.stem}: {runs[f'{peer}/{path.stem}']}", flush=True)
    rows = counted()
    document = {"line_length": LINE_LENGTH, "peers": PEERS, "tasks": rows, "runs": runs, "versions": versions}
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(f"{row['task']:<16} {row['lines']} shared {row['shared']}")


if __name__ == "__main__":
    main()

"""Makes the executed .ipynb twins of the notebooks in examples/notebooks from their .py files.

    python scripts/notebooks.py            # all of them
    python scripts/notebooks.py 02 05      # those whose names begin like this
    python scripts/notebooks.py --check    # runs nothing: is each twin made from its .py, by the present code?

The .py files are Databricks notebook source: cells parted by `# COMMAND ----------`, Markdown behind `# MAGIC`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from traitlets.config import Config

import spark_elastic

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"
FIRST_LINE = "# Databricks notebook source"
_NEXT_CELL = re.compile(r"^# COMMAND -+\n", re.MULTILINE)
_GREETINGS = re.compile(
    r"^(?:\[[^\]]+\]<stderr>:)?"  # a worker's
    r"(?:WARNING: Using incubator modules|WARNING: All log messages before absl|[IWE]\d{4} \d\d:\d\d:\d\d).*\n?",
    re.MULTILINE,
)
"""What Java and TensorFlow say of themselves when they start."""
RECORD = "spark_elastic"
"""The key of a twin's metadata that says what it was executed with: see `executed_with`."""
_MAGIC = re.compile(r"^# MAGIC ?", re.MULTILINE)

SPARK_CONF = {
    # Neither a page of warnings about this machine, nor its name and addresses.
    "log4j2.properties": """\
rootLogger.level = error
rootLogger.appenderRef.console.ref = console
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = error
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c{1}: %m%n
""",
    "spark-defaults.conf": """\
spark.driver.host 127.0.0.1
spark.ui.enabled false
spark.ui.showConsoleProgress false
spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
""",
}


def sources() -> list[Path]:
    return sorted(FOLDER.glob("[0-9]*.py"))


def notebook_of(source: str) -> NotebookNode:
    """The notebook of a .py file, without outputs. Raises: ValueError: it is none."""
    first, _, rest = source.partition("\n")
    if first != FIRST_LINE:
        raise ValueError(f"the first line has to be {FIRST_LINE!r}, not {first!r}")
    cells = []
    for number, text in enumerate(_NEXT_CELL.split(rest)):
        text = text.strip("\n")
        if text.startswith("# MAGIC %md"):
            words = _MAGIC.sub("", text).removeprefix("%md").strip()
            cells.append(new_markdown_cell(words, id=f"cell-{number}"))
        elif "# MAGIC" in text:
            raise ValueError(f"of the magic commands only %md is understood here: {text[:60]!r}")
        else:
            cells.append(new_code_cell(text, id=f"cell-{number}"))
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return new_notebook(cells=cells, metadata=metadata)


def execute(notebook: NotebookNode, timeout_s: float = 300.0) -> NotebookNode:
    """Run all cells in a kernel of this Python, in an empty folder, and keep what they show.

    Raises: nbclient.exceptions.CellExecutionError: a cell raised.
    """
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        conf = Path(folder, "conf")
        conf.mkdir()
        for name, text in SPARK_CONF.items():
            (conf / name).write_text(text)
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": paths, "SPARK_CONF_DIR": str(conf), "TF_CPP_MIN_LOG_LEVEL": "2"}
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            config=Config({"KernelManager": {"transport": "ipc", "ip": str(Path(folder, "kernel"))}}),
            timeout=timeout_s,
            coalesce_streams=True,  # of a progress bar's states only the last
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=env)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.text = _GREETINGS.sub("", output.text)
            cell.outputs = [output for output in cell.outputs if output.get("text", "something").strip()]
    notebook.metadata[RECORD] = executed_with()
    for key in set(notebook.metadata) - {"kernelspec", "language_info", RECORD}:
        del notebook.metadata[key]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def twin_of(path: Path) -> Path:
    return path.with_suffix(".ipynb")


def differs(path: Path) -> str | None:
    """Why the twin is not what the script makes of the .py; None: it is."""
    twin = twin_of(path)
    if not twin.exists():
        return f"{twin.name} is missing"
    wanted, found = notebook_of(path.read_text()), nbformat.read(twin, as_version=4)
    if [(c.cell_type, c.source) for c in wanted.cells] != [(c.cell_type, c.source) for c in found.cells]:
        return f"{twin.name} has other cells than {path.name}"
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        return f"{twin.name} was not executed from top to bottom"
    return None


def executed_with() -> dict[str, str]:
    """Return what decides which lines a notebook shows: the version, and the sources that make words and bars."""
    digest = hashlib.sha256()
    for path in sorted(Path(ROOT, "spark_elastic", "reporting").glob("*.py")):
        digest.update(ast.unparse(_without_docstrings(ast.parse(path.read_text()))).encode())
    return {"version": spark_elastic.__version__, "reporting": digest.hexdigest()[:16]}


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            kept = [
                each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
            node.body = kept or [ast.Pass()]
    return tree


def outdated(path: Path) -> str | None:
    """Return why the twin may show what the present code does not; None: it was executed with this code."""
    found, wanted = nbformat.read(twin_of(path), as_version=4).metadata.get(RECORD), executed_with()
    if found is None:
        return f"{twin_of(path).name} does not say what it was executed with"
    changed = [f"{name} {found.get(name)}, now {value}" for name, value in wanted.items() if found.get(name) != value]
    return f"{twin_of(path).name} was executed with {', '.join(changed)}" if changed else None


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", help="how the names of the notebooks begin; default: all")
    arguments.add_argument(
        "--check", action="store_true", help="compare the twins with the .py files and with the present code"
    )
    options = arguments.parse_args()
    chosen = [path for path in sources() if not options.names or path.name.startswith(tuple(options.names))]
    if options.check:
        wrong = [why for why in (differs(path) or outdated(path) for path in chosen) if why is not None]
        print("\n".join(wrong) or f"{len(chosen)} twins are made from their .py files, by the present code")
        return 1 if wrong else 0
    for path in chosen:
        began = time.monotonic()
        nbformat.write(execute(notebook_of(path.read_text())), twin_of(path))
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

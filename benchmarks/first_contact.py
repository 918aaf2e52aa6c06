"""What a newcomer waits for: the README's commands in an empty folder with an empty home, until a first own model.

It builds the wheel, makes a virtual environment and installs it as the README says, runs the README's program without
activating the environment, runs it again for longer and kills a worker, and trains on a CSV file. Then it makes common
mistakes, and measures how long it takes until the error that names the remedy.

    python benchmarks/first_contact.py
    python benchmarks/first_contact.py --torch "torch"    # where PyTorch's own index cannot be reached
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import RESULTS, machine

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch --index-url https://download.pytorch.org/whl/cpu"  # the README's
_OF_OTHER_ENVIRONMENTS = ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")
LIMIT_S = 600.0
WORKER = "spark_elastic.task.main"
CALLED = "^fit is called$"

NOTEBOOK = """\
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(open(sys.argv[1]).read())])
NotebookClient(book, timeout=300, kernel_name="python3").execute()
for output in book.cells[0].outputs:
    print(output.get("text", ""), end="")
"""


def readme_program() -> str:
    """Return the README's first Python program, which it tells the reader to save as quick.py."""
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit("README.md has no Python program")
    return found.group(1)


def announced(program: str) -> str:
    """Return the program with a line that it prints just before it calls `fit`."""
    changed = program.replace("model = estimator.fit(", f'print("{CALLED[1:-1]}", flush=True)\nmodel = estimator.fit(')
    if changed == program:
        raise SystemExit("the README's program does not call fit as expected")
    return changed


def on_csv(program: str, path: Path) -> str:
    """Return the program as a reader changes it for a CSV file of their own, with three columns of numbers."""
    rows = f'points = spark.read.csv("{path}", header=True, inferSchema=True)\n'
    changed = re.sub(r"^points = spark.*?(?=^net = )", rows, program, flags=re.MULTILINE | re.DOTALL)
    changed = changed.replace('["x", "y"]', '["height", "weight", "age"]').replace('["label"]', '["well"]')
    return changed.replace("nn.Linear(2, 32)", "nn.Linear(3, 32)").replace('"x", "y", "label"', '"well"')


def write_csv(path: Path) -> None:
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["height", "weight", "age", "well"])
        for _ in range(5_000):
            row = [draw.gauss(0, 1) for _ in range(3)]
            rows.writerow([*row, int(row[0] > row[1])])


class Newcomer:
    """An empty folder and home, and the environment of somebody who has installed nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "home").mkdir()
        path = [part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(sys.prefix)]
        self.env = {name: value for name, value in os.environ.items() if name not in _OF_OTHER_ENVIRONMENTS}
        self.env |= {"HOME": str(folder / "home"), "PATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}

    def command(self, *words: str | Path) -> float:
        """Run a command that has to succeed. Returns its seconds."""
        began = time.monotonic()
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise SystemExit(f"{shlex.join(map(str, words))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return time.monotonic() - began

    def lines(self, *words: str | Path, **env: str) -> Iterator[tuple[float, str]]:
        """Yield the lines that a program prints, with the seconds since its start; the last one is its exit status."""
        began = time.monotonic()
        process = subprocess.Popen(
            words, cwd=self.folder, env={**self.env, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield time.monotonic() - began, line.rstrip()
            yield time.monotonic() - began, f"exit status {process.wait(LIMIT_S)}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()


def workers_below(folder: Path) -> list[int]:
    """Return the ids of the worker processes of this folder's environment, as `ps` shows them."""
    shown = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in shown.splitlines() if WORKER in line and str(folder / "env") in line]


def watch(
    lines: Iterator[tuple[float, str]], moments: dict[str, str], act: Callable[[], None] | None = None
) -> dict[str, float]:
    """Note when the first line of each kind came; `act` is called at the first one of the first kind.

    Args:
        moments: By name, a regular expression for its line.

    Raises:
        SystemExit: The program failed, or a line did not come.
    """
    found: dict[str, float] = {}
    printed = []
    for seconds, line in lines:
        printed.append(line)
        for name, pattern in moments.items():
            if name not in found and re.search(pattern, line):
                found[name] = seconds
                if act is not None and name == next(iter(moments)):
                    act()
        found["seconds"] = seconds
    if printed[-1] != "exit status 0" or not moments.keys() <= found.keys():
        raise SystemExit(f"looked for {moments}, found {found}:\n" + "\n".join(printed[-60:]))
    return found


def until_error(newcomer: Newcomer, program: Path, error: str, **env: str) -> dict[str, object]:
    """Run a program that has to fail. Returns the seconds until it ended, and the lines that match `error`."""
    printed = list(newcomer.lines(newcomer.folder / "env/bin/python", program, **env))
    matching = [line for _, line in printed if re.search(error, line)]
    if printed[-1][1] == "exit status 0" or not matching:
        raise SystemExit(f"no line has {error!r}:\n" + "\n".join(line for _, line in printed[-60:]))
    return {"seconds": printed[-1][0], "said": matching[-1], "lines": len(printed) - 1}


def path_without_java(folder: Path, path: str) -> str:
    """Return a PATH with links to all commands but Java's."""
    shadow = folder / "no-java"
    shadow.mkdir()
    for part in path.split(os.pathsep):
        for each in sorted(Path(part).glob("*")) if part else []:
            if each.name != "java" and not (shadow / each.name).exists():
                (shadow / each.name).symlink_to(each)
    return str(shadow)


def good_way(newcomer: Newcomer, wheel: Path, torch: str) -> dict[str, object]:
    """Do what the README says. Returns the seconds of each step."""
    folder, python = newcomer.folder, newcomer.folder / "env" / "bin" / "python"
    times: dict[str, object] = {
        "make the environment": newcomer.command("python3", "-m", "venv", "env"),
        "install torch": newcomer.command(python, "-m", "pip", "install", "--quiet", *shlex.split(torch)),
        "install the wheel": newcomer.command(python, "-m", "pip", "install", "--quiet", f"{wheel}[spark]"),
    }
    program = readme_program()
    (folder / "quick.py").write_text(announced(program))
    moments = {"the call of fit": CALLED, "first epoch": r"^epoch 1/5 ", "model": r"^\[0\.\d+"}
    times["quick.py"] = watch(newcomer.lines(python, "quick.py"), moments)

    (folder / "longer.py").write_text(program.replace("epochs=5", "epochs=100"))

    def kill_a_worker() -> None:
        os.kill(min(workers_below(folder)), signal.SIGKILL)  # the oldest, as `pkill -o`: the others may be guards

    moments = {"first epoch": r"^epoch 1/100 ", "told of the loss": r"lost", "model": r"^\[0\.\d+"}
    times["a worker is killed"] = watch(newcomer.lines(python, "longer.py"), moments, kill_a_worker)

    write_csv(folder / "people.csv")
    (folder / "own.py").write_text(on_csv(program, folder / "people.csv"))
    times["a CSV file"] = watch(
        newcomer.lines(python, "own.py"), {"first epoch": r"^epoch 1/5 ", "model": r"^\[0\.\d+"}
    )
    return times


def mistakes(newcomer: Newcomer) -> dict[str, object]:
    """Make a newcomer's mistakes. Returns the seconds until each error, and what it says."""
    folder, python = newcomer.folder, newcomer.folder / "env" / "bin" / "python"
    found: dict[str, object] = {}
    found["PYSPARK_PYTHON is no file"] = until_error(
        newcomer, folder / "quick.py", "PYSPARK_PYTHON", PYSPARK_PYTHON="/usr/bin/python9"
    )
    bare = folder / "bare"
    newcomer.command("python3", "-m", "venv", bare)
    found["PYSPARK_PYTHON lacks the packages"] = until_error(
        newcomer, folder / "quick.py", "PYSPARK_PYTHON", PYSPARK_PYTHON=str(bare / "bin" / "python")
    )
    env = {"PATH": path_without_java(folder, newcomer.env["PATH"]), "JAVA_HOME": ""}
    found["no Java"] = until_error(newcomer, folder / "quick.py", "(?i)java", **env)
    (folder / "run_notebook.py").write_text(NOTEBOOK)
    newcomer.command(python, "-m", "pip", "install", "--quiet", "nbclient", "ipykernel")
    found["in a notebook"] = watch(newcomer.lines(python, "run_notebook.py", "quick.py"), {"model": r"^\[0\.\d+"})
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--torch", default=TORCH, help="what pip installs PyTorch with (%(default)s)")
    arguments.add_argument("--wheel", type=Path, help="of this package; otherwise one is built")
    arguments.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON file goes")
    args = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="first-contact-"))
    try:
        wheel = args.wheel
        if wheel is None:
            command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
            subprocess.run(command, check=True, capture_output=True)
            (wheel,) = folder.glob("*.whl")
        newcomer = Newcomer(folder)
        load = os.getloadavg()[0]
        document = {
            "benchmark": "first_contact",
            "machine": machine(),
            "arguments": {"torch": args.torch},
            "load at the start": load,
            "steps": good_way(newcomer, wheel.resolve(), args.torch),
            "mistakes": mistakes(newcomer),
        }
        print(json.dumps(document, indent=1))
        (args.results / "first_contact.json").write_text(json.dumps(document, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

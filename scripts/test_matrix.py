"""Tests the package with other versions of Python, Spark, PyTorch, Keras, pandas, numpy, pyarrow: `make test-matrix`.

    python scripts/test_matrix.py [ROW ...] [--list] [--record] [--keep] [--python 3.12=PATH ...]

Each row gets a virtual environment with its versions, in which the checks are run; it is deleted afterwards. Rows that
share Python and frameworks share one installation of those. `--record` writes what was found into docs/versions.json;
`python docs/generate.py` makes the table of docs/versions.md from it. The exit status is 1 if a row failed.

PyTorch is installed as a CPU build ("+cpu"), from wherever pip is configured to look; the oldest, where there is none,
with its CUDA libraries. Where there is none for a row's Python, the row runs the checks that need no PyTorch, and says
so. A Python that has a torch itself, such as that of a distribution, lends it to its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matrix_checks import CHECKS, Check

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "versions.json"
CHECK_S = 900.0
"""Most seconds of one check. They take a tenth of it on a machine that does nothing else."""
TAIL_LINES = 60
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^;\s#]+)")
_SINCE = re.compile(r'python_version >= "3\.(\d+)"')
_OF_OTHER_ENVIRONMENTS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
_OF_OTHER_ENVIRONMENTS += ("SPARK_HOME", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")

SHOWN = ("pyspark", "torch", "keras", "tensorflow-cpu", "numpy", "pandas", "pyarrow")
"""The distributions whose versions are recorded."""
FRAMEWORKS = ("tensorflow-cpu", "keras")
TOOLS = ("pytest", "hypothesis", "psutil", "scikit-learn", "matplotlib", "cryptography")
CONNECT = ("grpcio", "grpcio-status", "googleapis-common-protos", "zstandard")


@dataclasses.dataclass(frozen=True)
class Row:
    """One set of versions.

    Attributes:
        about: What the row is for.
        python: Minor version of Python.
        pins: Versions that differ from constraints.txt; None for a package that the row does without, or that comes
            with another.
        connect: Whether Spark Connect's packages are installed.
        beyond: Whether the versions are newer than the metadata allows.
    """

    about: str
    python: str = "3.11"
    pins: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    connect: bool = False
    beyond: bool = False


OLDEST: dict[str, str | None] = {
    "pyspark": "3.5.0",
    "py4j": "0.10.9.7",
    "torch": "2.6.0",
    "tensorflow-cpu": "2.16.1",
    "tensorboard": None,  # the one of that TensorFlow
    "keras": "3.12.1",
    "numpy": "1.24.0",
    "pandas": "2.0.0",
    "pyarrow": "15.0.0",
    "cloudpickle": "2.2.0",
    "cryptography": "42.0.0",
    "tqdm": "4.64.0",
    "scikit-learn": "1.4.0",
    "scipy": "1.12.0",
    "matplotlib": "3.8.4",
}

_OF_FRAMEWORKS = ("tensorboard", "numpy", "scikit-learn", "scipy", "matplotlib")
"""What depends on the version of TensorFlow: its numpy, and those of others that work with that."""
ROWS = {
    "spark35": Row(
        "Spark 3.5, as it is installed with packages of its time",
        pins={"pyspark": "3.5.9", "py4j": "0.10.9.7", "numpy": "1.26.4", "pandas": "2.2.3", "pyarrow": "17.0.0"},
    ),
    "spark40": Row("Spark 4.0", pins={"pyspark": "4.0.5", "py4j": "0.10.9.9"}, connect=True),
    "spark41": Row("Spark 4.1", pins={"pyspark": "4.1.4", "py4j": "0.10.9.9"}, connect=True),
    "spark42": Row("Spark 4.2", pins={"pyspark": "4.2.1", "py4j": "0.10.9.9"}, connect=True),
    "spark43": Row("Spark 4.3: the versions of constraints.txt", connect=True),
    "oldest": Row("the oldest version of each package that the metadata allows", pins=OLDEST),
    "oldest-frameworks": Row(
        "the oldest Keras and TensorFlow with a new Spark",
        pins={name: OLDEST[name] for name in (*FRAMEWORKS, *_OF_FRAMEWORKS)},
    ),
    "pandas3": Row(
        "pandas 3, which Spark 4.3 warns of and the extra spark43 allows, and the newest pyarrow",
        pins={"pandas": "3.1.1", "pyarrow": "26.0.1"},
        connect=True,
        beyond=True,
    ),
    "python310": Row("Python 3.10", python="3.10", pins={"pyspark": "4.2.1"}),
    "python312": Row("Python 3.12", python="3.12"),
    "python313": Row("Python 3.13", python="3.13"),
}


class MatrixError(Exception):
    """A row cannot be run."""


# --- what is installed ------------------------------------------------------------------------------------------------


def default_pins(text: str, python: str = "3.11") -> dict[str, str]:
    """Return name → version of the exact pins in a constraints file that hold for a minor version of Python."""
    minor = int(python.partition(".")[2])
    pins = {}
    for line in text.splitlines():
        since = _SINCE.search(line)
        if (found := _PIN.match(line.strip())) and (since is None or minor >= int(since[1])):
            pins[found[1]] = found[2]
    return pins


def constraints_of(row: Row, text: str, torch: str | None) -> str:
    """Return the constraints file of a row.

    Args:
        row: The row.
        text: The constraints that it departs from.
        torch: Version of PyTorch; None if pip must install none.
    """
    changed = {"torch", *row.pins}
    kept = [line for line in text.splitlines() if re.split(r"[=<>;\s]", line.strip(), maxsplit=1)[0] not in changed]
    pinned = [f"{name}=={version}" for name, version in row.pins.items() if version and name != "torch"]
    return "\n".join([*kept, *pinned, *([f"torch=={torch}"] if torch else []), ""])


def torch_of(row: Row, text: str) -> str:
    return f"{row.pins.get('torch') or default_pins(text)['torch']}+cpu"


def requirements_of(row: Row) -> list[str]:
    wanted = [*FRAMEWORKS, *TOOLS, *(CONNECT if row.connect else ())]
    return [name for name in wanted if row.pins.get(name, "any") is not None]


@dataclasses.dataclass
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *words: str | Path) -> None:
        """Raises: MatrixError: pip failed; it has the end of what pip wrote."""
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment_of(self), capture_output=True, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
            raise MatrixError("\n".join(["pip install failed:", *said[-12:]]))

    def versions(self) -> dict[str, str]:
        program = (
            "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
        )
        found = subprocess.run([self.python, "-c", program], capture_output=True, text=True, check=True).stdout
        return {name.lower().replace("_", "-"): version for name, version in json.loads(found).items()}


def environment_of(environment: Environment) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _OF_OTHER_ENVIRONMENTS}
    return {**env, "PATH": os.pathsep.join([str(environment.folder / "bin"), env["PATH"]])}


def interpreter(version: str, given: Mapping[str, str]) -> str:
    """Return the Python of a minor version: the one given, this one, one of PATH, or pyenv's.

    Raises:
        MatrixError: There is none.
    """
    if version in given:
        return given[version]
    if version == ".".join(platform.python_version_tuple()[:2]):
        return os.path.realpath(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))]
    for found in filter(None, candidates):
        if subprocess.run([found, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
            return found
    raise MatrixError(f"no Python {version} was found; name one: --python {version}=/path/to/python{version}")


def has_torch(python: str) -> bool:
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return subprocess.run([python, "-I", "-c", code], capture_output=True).returncode == 0


def install(row: Row, folder: Path, python: str) -> tuple[Environment, list[str]]:
    """Make the environment of a row; what it shares with other rows is linked from `folder`/common-*.

    Returns: the environment, and what could not be had.
    """
    text = (ROOT / "constraints.txt").read_text()
    remarks = []
    lent = has_torch(python)
    torch = None if lent else torch_of(row, text)
    pins = {**default_pins(text, row.python), **row.pins}
    shared = {name: pins.get(name) for name in (*FRAMEWORKS, "scikit-learn")}
    key = hashlib.sha256(json.dumps([python, torch, shared]).encode()).hexdigest()[:12]
    common = Environment(folder.parent / f"common-{key}")
    if not (common.folder / "complete").exists():
        shutil.rmtree(common.folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", *["--system-site-packages"] * lent, common.folder], check=True)
        if torch:
            wanted = row.pins.get("torch")  # an old one: if not as a CPU build, then with its CUDA libraries
            for candidate in dict.fromkeys((torch, wanted or torch, torch_of(Row(""), text))):
                with contextlib.suppress(MatrixError):
                    alone = ["--no-deps"] if candidate.endswith("+cpu") else []
                    common.pip("--only-binary=:all:", *alone, f"torch=={candidate}")
                    break
        common.pip(*(f"{name}=={version}" if version else name for name, version in shared.items()))
        (common.folder / "complete").touch()
    made = Environment(folder)
    shutil.copytree(common.folder, made.folder, symlinks=True, copy_function=os.link)
    installed = made.versions()
    found = None if lent else installed.get("torch")
    if torch and found != torch:
        instead = f"; {'that for GPUs' if found == row.pins.get('torch') else found} is in its place" if found else ""
        remarks.append(f"no CPU build of PyTorch {torch.partition('+')[0]} for Python {row.python} was found{instead}")
    limits = folder.with_suffix(".txt")
    limits.write_text(constraints_of(row, text, found))
    words: list[str | Path] = ["--constraint", limits, *requirements_of(row)]
    if row.beyond or (torch and not found):  # without PyTorch, pip would take a build for GPUs
        words += ["pyspark", "pandas", "pyarrow", "cloudpickle", "tqdm", *(["torch"] if found else [])]
        made.pip(*words)
        made.pip("--no-deps", "--editable", ROOT)
    else:
        made.pip(*words, "--editable", f"{ROOT}[spark]")
    return made, remarks


# --- checks -----------------------------------------------------------------------------------------------------------


def import_all() -> int:
    """Import every module of the package, and print those that fail for another reason than a missing extra."""
    import importlib
    import pkgutil

    import spark_elastic
    from spark_elastic.errors import MissingExtraError

    ours = [module.name for module in pkgutil.walk_packages(spark_elastic.__path__, "spark_elastic.")]
    failed, missing = 0, set()
    for name in ours:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith(("spark_elastic", "pyspark.")):
                raise
            missing.add(error.name)
        except MissingExtraError as error:
            missing.add(error.package)
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}")
    print(f"{len(ours)} modules; not installed: {', '.join(sorted(missing)) or 'nothing'}")
    return 1 if failed else 0


def why_not(check: Check, versions: Mapping[str, str], lent: bool) -> str:
    """Return why a check cannot be run with these versions; "" if it can."""
    absent = [name for name in check.needs if name not in versions and not (name == "torch" and lent)]
    spark = tuple(int(part) for part in versions["pyspark"].split(".")[:2])
    return f"no {', '.join(absent)}" if absent else "needs a newer Spark" if spark < check.oldest_spark else ""


def run_check(check: Check, environment: Environment, log: Path) -> bool:
    """Run one check in a folder of its own; return True if it passed. Its processes end with it."""
    temporary = tempfile.mkdtemp(prefix="matrix-")
    env = {**environment_of(environment), "TMPDIR": temporary, "PYTHONPATH": str(ROOT)}
    env["TF_CPP_MIN_LOG_LEVEL"] = "2"
    if check.program:
        words, where = [str(ROOT / check.program[0]), *check.program[1:]], temporary
        env["PYSPARK_PYTHON"] = str(environment.python)
    else:
        words, where = ["-m", "pytest", "-q", "--nightly", "-p", "no:cacheprovider", *check.tests], str(ROOT)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [environment.python, *words], cwd=where, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(CHECK_S)
        except subprocess.TimeoutExpired:
            output.write(f"\nnot done after {CHECK_S:.0f} s\n".encode())
            status = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(temporary, ignore_errors=True)
    return status == 0


def counted(log: str) -> str:
    """Return pytest's counts from its last line, such as "3 passed, 1 skipped"."""
    found = re.findall(r"\d+ (?:passed|failed|skipped|errors?|deselected)", (log.strip().splitlines() or [""])[-1])
    return ", ".join(found)


def run_row(
    name: str, cache: Path, given: Mapping[str, str], only: Sequence[str], keep: bool, results: Path | None
) -> list[str]:
    """Install a row's versions and run its checks; return the names of those that failed.

    Args:
        name: The row.
        cache: Where its environment is made.
        given: Paths of Pythons by version.
        only: Checks to run; all if empty.
        keep: Whether the environment is kept.
        results: The file that each outcome is recorded in; None for no record.
    """
    row, began = ROWS[name], time.monotonic()
    folder = cache / name
    shutil.rmtree(folder, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    python = interpreter(row.python, given)
    print(f"== {name}: {row.about} ({python})", flush=True)
    try:
        environment, remarks = install(row, folder, python)
        lent = has_torch(str(environment.python))
        versions = environment.versions()
        shown = {what: versions[what] for what in SHOWN if what in versions}
        exact = subprocess.check_output([environment.python, "-c", "import platform as p; print(p.python_version())"])
        print(f"   {time.monotonic() - began:.0f} s; {', '.join(map(' '.join, shown.items()))}", flush=True)
        for remark in remarks:
            print(f"   {remark}", flush=True)
        known = {"python": exact.decode().strip(), "versions": shown, "remarks": remarks}
        failed = []
        for what, check in CHECKS.items():
            if only and what not in only:
                continue
            if reason := why_not(check, versions, lent):
                if results:
                    record(results, name, known, what, reason)
                continue
            log, at = cache / f"{name}-{what.replace(' ', '-')}.log", time.monotonic()
            passed = run_check(check, environment, log)
            said = log.read_text(errors="replace")
            outcome = "passed" if passed else "failed"
            if results:
                record(results, name, known, what, outcome)
            print(f"   {what:12} {outcome}  {time.monotonic() - at:5.0f} s  {counted(said)}", flush=True)
            if not passed:
                failed.append(what)
                print("\n".join(f"   | {line}" for line in said.splitlines()[-TAIL_LINES:]), flush=True)
                print(f"   all of it: {log}", flush=True)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return failed


# --- what is recorded -------------------------------------------------------------------------------------------------


def record(results: Path, name: str, known: Mapping[str, Any], check: str, outcome: str) -> None:
    """Write the outcome of a check into the results.

    Outcomes of the row's other checks stay if they were found with the same versions; rows are in the order of `ROWS`.

    Args:
        results: The file.
        name: The row.
        known: Python, versions and remarks of the row.
        check: The check.
        outcome: "passed", "failed", or why it was not run.
    """
    rows = json.loads(results.read_text())["rows"] if results.exists() else {}
    old = rows.get(name, {})
    checks = old["checks"] if all(old.get(what) == known[what] for what in ("python", "versions")) else {}
    ordered = {each: {**checks, check: outcome}[each] for each in CHECKS if each in {*checks, check}}
    rows[name] = {"about": ROWS[name].about, **known, "checks": ordered}
    rows = {each: rows[each] for each in ROWS if each in rows}
    document = {"checks": {each: CHECKS[each].about for each in CHECKS}, "rows": rows}
    results.write_text(json.dumps(document, indent=1) + "\n")


def pythons(words: Sequence[str]) -> dict[str, str]:
    """Return version → path of `--python 3.12=/path` options."""
    parts = [word.partition("=") for word in words]
    for word, (version, separator, path) in zip(words, parts, strict=True):
        if not re.fullmatch(r"3\.\d+", version) or not separator or not path:
            raise MatrixError(f"--python {word} is not of the form 3.12=/path/to/python3.12")
    return {version: path for version, _, path in parts}


def chosen(names: Sequence[str], known: Mapping[str, Any], what: str) -> list[str]:
    if unknown := [name for name in names if name not in known]:
        raise MatrixError(f"no {what} is named {', '.join(unknown)}; there are {', '.join(known)}")
    return list(names)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end this as Ctrl-C does, so that no check outlives it."""

    def stop(number: int, _frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to run: all of {', '.join(ROWS)}")
    parser.add_argument("--list", action="store_true", help="show the rows and checks, and run nothing")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="run this check, not all")
    parser.add_argument("--record", action="store_true", help="write the results into docs/versions.json")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--python", action="append", default=[], metavar="3.N=PATH", help="the Python of a version")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "matrix", help="where environments are made")
    parser.add_argument("--import-all", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.import_all:
        return import_all()
    if options.list:
        print("\n".join(f"{name:20} Python {row.python:5} {row.about}" for name, row in ROWS.items()))
        print("\n".join(["", *(f"{name:20} {check.about}" for name, check in CHECKS.items())]))
        return 0
    rows = chosen(options.rows, ROWS, "row") or list(ROWS)
    only = chosen(options.only, CHECKS, "check")
    given = pythons(options.python)
    results = RESULTS if options.record else None
    failed: list[str] = []
    cache = options.cache.resolve()
    with ended_by_signals():
        try:
            for name in rows:
                try:
                    wrong = run_row(name, cache, given, only, options.keep, results)
                except MatrixError as error:
                    print(f"   {error}", flush=True)
                    wrong = ["install"]
                failed += [name] if wrong else []
        finally:
            if not options.keep:
                for common in cache.glob("common-*"):
                    shutil.rmtree(common, ignore_errors=True)
    print(f"{len(rows) - len(failed)} rows passed, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MatrixError as error:
        sys.exit(f"test-matrix: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

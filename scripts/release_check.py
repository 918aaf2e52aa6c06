"""Builds a release and uses it as a stranger would: `make release-check`. Uploads nothing.

The executed notebooks have to be of this version. sdist and wheel are built, checked by twine, and compared: the wheel
that the sdist builds is the same one. The wheel is installed in a new virtual environment outside of this folder, and
the quickstart is run with it, from that folder and without activating the environment (`--activated`: with it). The
files stay in dist/.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_OF_OTHER_ENVIRONMENTS = ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class ReleaseError(Exception):
    """The release is not as it should be."""


def run(*words: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    began = time.monotonic()
    done = subprocess.run(words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = " ".join(str(word) for word in words)
    if done.returncode:
        raise ReleaseError(f"{said} ended with {done.returncode}:\n{done.stdout}")
    print(f"{time.monotonic() - began:6.1f} s  {said[:120]}", flush=True)


def build(source: Path, kind: str, into: Path) -> Path:
    run(sys.executable, "-m", "build", f"--{kind}", "--outdir", into, source)
    (built,) = into.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_wheel(wheel: Path) -> None:
    """Raise `ReleaseError` unless the wheel has the package's files, all of them and nothing else."""
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "spark_elastic"], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = set(tracked.stdout.splitlines())
    if found != wanted:
        raise ReleaseError(f"the wheel lacks {sorted(wanted - found)} and has {sorted(found - wanted)} besides")
    if "spark_elastic/py.typed" not in found:
        raise ReleaseError("the wheel has no py.typed, so type checkers ignore its types")


def check_same(first: Path, second: Path) -> None:
    """Raise `ReleaseError` unless two wheels hold the same files."""
    one, other = contents(first), contents(second)
    different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    if different or first.name != second.name:
        raise ReleaseError(f"the sdist builds another wheel: {first.name}, {second.name}, {different}")


def quickstart() -> str:
    """Return the code of the quickstart as one program."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    checked = "import spark_elastic\nprint('version', spark_elastic.__version__, 'of', spark_elastic.__file__)\n"
    return "\n".join(_BLOCK.findall(page)) + checked


def train(wheel: Path, folder: Path, activated: bool) -> None:
    """Install the wheel in a new environment and run the quickstart there, from outside of the checkout."""
    env = {name: value for name, value in os.environ.items() if name not in _OF_OTHER_ENVIRONMENTS}
    parts = [part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(sys.prefix)]
    env["PATH"] = os.pathsep.join([str(folder / "env" / "bin")] * activated + parts)
    began = time.monotonic()
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    requirement = f"spark-elastic[spark,plot] @ {wheel.as_uri()}"
    run(python, "-m", "pip", "install", "--quiet", *constraints, requirement, cwd=folder, env=env)
    program = folder / "quickstart.py"
    program.write_text(quickstart())
    run(python, "-c", f"import spark_elastic as it; assert {str(folder)!r} in it.__file__", cwd=folder, env=env)
    run(python, program, cwd=folder, env=env)
    run(folder / "env" / "bin" / "spark-elastic", "--version", cwd=folder, env=env)
    print(f"{time.monotonic() - began:6.1f} s  from nothing to a trained model")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--activated", action="store_true", help="run the quickstart in the activated environment")
    options = arguments.parse_args()
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    for old in dist.iterdir():
        old.unlink()
    run(sys.executable, "scripts/notebooks.py", "--check")
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        sdist = build(ROOT, "sdist", folder / "sdist")
        wheel = build(ROOT, "wheel", folder / "wheel")
        check_wheel(wheel)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (unpacked,) = (folder / "unpacked").iterdir()
        check_same(wheel, build(unpacked, "wheel", folder / "again"))
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        (folder / "home").mkdir()
        train(wheel, folder / "home", options.activated)
        for each in (sdist, wheel):
            each.replace(dist / each.name)
            print(f"{(dist / each.name).stat().st_size / 1024:6.0f} KiB  dist/{each.name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        sys.exit(f"release-check: {error}")

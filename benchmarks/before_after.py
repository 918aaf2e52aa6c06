"""Compare this checkout with another one, in turns: steps, kills, reading, writing, `fit`, `transform` and starts.

    git worktree add ../before v0.1.0
    python benchmarks/before_after.py ../before [--turns 6] [--only step kill read write fit transform start]

Each turn runs the benchmarks of both checkouts in separate processes; the order of the two alternates. Prints a table
of the medians over all turns and of the ratio "after / before" of each turn (below 1: the change is faster), and writes
benchmarks/results/before_after.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _harness import Series, parser, report

HERE = Path(__file__).resolve().parents[1]
MODELS = ("784-128-10", "784-512-512-10", "784-3072-2048-512-10")
CALLS = ("first", "second")
STEP_CONTENDERS = ("spark_elastic", "spark_elastic, commit every step")


def run(checkout: Path, script: str, *arguments: object) -> None:
    """Run one benchmark of a checkout, with that checkout's package and nothing of the other's."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(checkout / "benchmarks" / script), *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} of {checkout.name} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def raw_of(checkout: Path, script: str, *arguments: object) -> dict[str, Any]:
    """Run one benchmark of a checkout. Return what it measured, before any summary."""
    with tempfile.TemporaryDirectory() as folder:
        run(checkout, script, *arguments, "--results", folder)
        raw: dict[str, Any] = json.loads(next(Path(folder).glob("*.json")).read_text())["raw"]
    return raw


def steps(checkout: Path) -> dict[str, float]:
    """Return the median milliseconds a step, by model and contender. The checkout's own figures are left alone."""
    kept = checkout / "benchmarks" / "results" / "step_time.json"
    before = kept.read_bytes() if kept.exists() else None
    try:
        run(checkout, "step_time.py", "--rounds", 20, "--models", *MODELS)
        models = json.loads(kept.read_text())["models"]
    finally:
        if before is not None:
            kept.write_bytes(before)
    return {
        f"step, {model}, {contender} [ms]": rows[contender]["median_ms"]
        for model, rows in models.items()
        for contender in STEP_CONTENDERS
    }


def kills(checkout: Path) -> dict[str, float]:
    """Return the median milliseconds from SIGKILL of one of three workers to the last survivor's next step."""
    raw = raw_of(checkout, "recovery.py", "--repeat", 10, "--sizes", 3)
    return {"kill -> next step, 3 -> 2 [ms]": statistics.median(raw["to_next_step"]["3 -> 2"])}


def reading(checkout: Path) -> dict[str, float]:
    """Return the median nanoseconds a row of a reader in global order, files in the page cache."""
    raw = raw_of(checkout, "data_read.py", "--only", "resident", "--repeat", 3)
    return {f"reading, {shape} [ns/row]": statistics.median(raw[shape]["global"]) for shape in ("A", "B", "C")}


def writing(checkout: Path) -> dict[str, float]:
    """Return the median seconds in which a cached DataFrame is written."""
    raw = raw_of(checkout, "data_write.py", "--only", "A", "B", "--scale", 0.5, "--repeat", 2)
    return {f"writing, {shape} [s]": statistics.median(raw[shape]["materialize_s"]) for shape in ("A", "B")}


def fits(checkout: Path) -> dict[str, float]:
    """Return the median seconds of `ElasticTorchEstimator.fit`, and of its epochs alone."""
    runs = raw_of(checkout, "fit.py", "--repeat", 2, "--no-peer")["fit"]
    return {f"fit, {part} [s]": statistics.median(each[part] for each in runs) for part in ("wall", "epochs")}


def transforms(checkout: Path) -> dict[str, float]:
    """Return the nanoseconds a row of `transform`."""
    raw = raw_of(checkout, "transform.py", "--repeat", 3, "--peer-rows", 500)
    return {"transform [ns/row]": 1e9 / statistics.median(raw["transform"])}


def starts(checkout: Path) -> dict[str, float]:
    """Return the median seconds from the call of `run` to the first step, of first and second calls."""
    raw = raw_of(checkout, "start.py", "--on", "local-cluster", "--repeat", 3)
    return {f"start, {call} call [s]": statistics.median(e["first step"] for e in raw[call]) for call in CALLS}


PARTS: dict[str, Callable[[Path], dict[str, float]]] = {
    "step": steps,
    "kill": kills,
    "read": reading,
    "write": writing,
    "fit": fits,
    "transform": transforms,
    "start": starts,
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("other", type=Path, help="the checkout to compare with")
    arguments.add_argument("--turns", type=int, default=6)
    arguments.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = arguments.parse_args()
    checkouts = {"before": args.other.resolve(), "after": HERE}
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(args.turns):
        for part in args.only:
            for name in ("before", "after") if turn % 2 else ("after", "before"):
                for label, value in PARTS[part](checkouts[name]).items():
                    found.setdefault(label, {"before": [], "after": []})[name].append(value)
        print(f"turn {turn + 1} of {args.turns} is done, load {os.getloadavg()[0]:.2f}", file=sys.stderr)
    report("before_after", args, *series(found), raw={"turns": found, "load": os.getloadavg()})


def series(found: dict[str, dict[str, list[float]]]) -> list[Series]:
    """Return three rows for each label: before, after, and the ratio of each turn."""
    out = []
    for label, values in found.items():
        what, _, unit = label.rstrip("]").rpartition(" [")
        out += [Series(f"{what}, {name}", each, unit) for name, each in values.items()]
        ratios = [after / before for after, before in zip(values["after"], values["before"], strict=True)]
        out.append(Series(f"{what}, ratio", ratios, "x"))
    return out


if __name__ == "__main__":
    main()

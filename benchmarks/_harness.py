"""What every benchmark here shares: arguments, percentiles, what machine it was, a table, a JSON file.

::

    args = parser(__doc__).parse_args()
    runs = [once() for _ in range(args.repeat)]
    report("recovery", args, Series("3 -> 2", runs, "ms", target_p50=150, target_p99=500), raw={"3 -> 2": runs})
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def parser(description: str | None, *, repeat: int = 20, results: Path = RESULTS) -> argparse.ArgumentParser:
    """The arguments that all benchmarks take; add your own to it."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repeat", type=int, default=repeat, metavar="N", help="measurements of each kind (%(default)s)")
    made.add_argument("--quick", action="store_true", help="a few measurements only, to see that it works")
    made.add_argument("--results", type=Path, default=results, metavar="DIR", help="where the JSON file goes")
    return made


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of the values do not exceed: never kinder than what was seen.

    Raises: ValueError: without values.
    """
    if not values:
        raise ValueError("no measurements")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Series:
    """One measured quantity. Targets are upper bounds in the same unit; None: only reported."""

    name: str
    values: Sequence[float]
    unit: str
    target_p50: float | None = None
    target_p99: float | None = None
    target_max: float | None = None

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "count": len(self.values),
            "min": min(self.values),
            "p50": statistics.median(self.values),
            "p90": percentile(self.values, 0.90),
            "p99": percentile(self.values, 0.99),
            "max": max(self.values),
            "targets": {"p50": self.target_p50, "p99": self.target_p99, "max": self.target_max},
            "reached": self.reached(),
        }

    def reached(self) -> bool | None:
        """Whether every target was met; None: there is none."""
        p50, p99, worst = statistics.median(self.values), percentile(self.values, 0.99), max(self.values)
        bounds = ((p50, self.target_p50), (p99, self.target_p99), (worst, self.target_max))
        checked = [value <= bound for value, bound in bounds if bound is not None]
        return all(checked) if checked else None


def machine() -> dict[str, Any]:
    """What the figures were measured on and with."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "java": _first_line(["java", "-version"]),
        **{
            name: _version(name) for name in ("spark-elastic", "torch", "pyspark", "tensorflow-cpu", "numpy", "pyarrow")
        },
    }


def report(name: str, args: argparse.Namespace, *series: Series, raw: dict[str, Any] | None = None) -> Path:
    """Print the table and write ``<results>/<name>.json``: the summaries, the machine, the arguments and `raw`."""
    summaries = [one.summary() for one in series]
    rows = [
        [
            s["name"],
            s["count"],
            *(f"{s[key]:.4g}" for key in ("min", "p50", "p90", "p99", "max")),
            s["unit"],
            _target(s),
        ]
        for s in summaries
    ]
    print(f"\n{name}")
    print(table(["what", "n", "min", "p50", "p90", "p99", "max", "unit", "target"], rows))
    # Without paths: they say something of one machine's folders and nothing of the figures.
    options = {key: value for key, value in vars(args).items() if not _is_path(value)}
    document = {"benchmark": name, "machine": machine(), "arguments": options, "series": summaries, "raw": raw or {}}
    args.results.mkdir(parents=True, exist_ok=True)
    path: Path = args.results / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)
    return path


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many files and connections as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def horovod(python: str, *arguments: object) -> list[float]:
    """Seconds of each repetition of `peer_horovod_estimator.py`, run by an interpreter that has Horovod."""
    script = Path(__file__).resolve().parent / "peer_horovod_estimator.py"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    env.update(PYSPARK_PYTHON=python, PYSPARK_DRIVER_PYTHON=python)
    done = subprocess.run([python, str(script), *map(str, arguments)], env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{script.name} has ended with {done.returncode}")
    walls: list[float] = json.loads(done.stdout.splitlines()[-1])["wall_s"]
    return walls


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _is_path(value: Any) -> bool:
    return isinstance(value, Path) or (isinstance(value, str) and os.path.isabs(value))


def _target(summary: dict[str, Any]) -> str:
    bounds = [f"{key} ≤ {bound:g}" for key, bound in summary["targets"].items() if bound is not None]
    return ", ".join(bounds) + (" ✓" if summary["reached"] else " ✗") if bounds else "-"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _first_line(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError:
        return None
    return next(iter(done.stdout.splitlines()), None)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

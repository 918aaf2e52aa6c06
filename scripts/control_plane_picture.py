"""Draw docs/images/control_plane.png: what a change of the world costs, by the number of workers, from its JSON.

    python benchmarks/control_plane.py
    python scripts/control_plane_picture.py [benchmarks/results/control-plane.json [docs/images/control_plane.png]]

`tests/unit/test_pages.py` does not compare the picture with the JSON: draw it anew when that file changes.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
CPU, WORLD, GATHER, GREY = "#3b82c4", "#d64545", "#6b8e9f", "#888888"


def draw(raw: dict[str, Any]) -> Figure:
    """Draw the raw measurements of `benchmarks/control_plane.py`, on logarithmic axes."""
    runs = raw["runs"]
    sizes = [run["size"] for run in runs]

    def of_loss(key: str) -> list[float]:
        return [1e3 * statistics.median(loss[key] for loss in run["losses"]) for run in runs]

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    cpu = of_loss("driver_cpu_s")
    axes.plot(sizes, [1e3 * run["assemble_s"] for run in runs], "o-", color=GATHER, label="all agents come at once")
    axes.plot(sizes, of_loss("s"), "o-", color=WORLD, label="loss until the last survivor holds the next world")
    axes.plot(sizes, cpu, "o-", color=CPU, label="of that, CPU of the driver")
    linear = [cpu[-1] * size / sizes[-1] for size in sizes]
    axes.plot(sizes, linear, color=GREY, linestyle="--", linewidth=1.0, label="in proportion to the workers")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_ylabel("milliseconds")
    axes.grid(color=GREY, alpha=0.25, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    return figure


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks/results/control-plane.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/images/control_plane.png"
    draw(json.loads(source.read_text())["raw"]).savefig(target, dpi=110)
    print(f"{target} was drawn from {source}")


if __name__ == "__main__":
    main()

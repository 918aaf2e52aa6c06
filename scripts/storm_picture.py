"""Draw docs/images/storm.png: the steps and the workers of a long storm of faults, from its JSON.

    python -m tests.storms.chaos --on standalone --loop exact --seconds 3600 --gap 7 --results build/chaos
    python scripts/storm_picture.py [tests/storms/results/chaos-soak.json [docs/images/storm.png]]

`tests/unit/test_pages.py` does not compare the picture with the JSON: draw it anew when that file changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

ROOT = Path(__file__).resolve().parents[1]
STEPS, WORKERS, FAULTS, GREY = "#3b82c4", "#6b8e9f", "#d64545", "#888888"


def draw(storm: dict[str, Any]) -> Figure:
    """Draw one storm of a document of `tests/storms/chaos.py`."""
    course = storm["course"]
    minutes = [at / 60 for at, _, _ in course]
    steps = [count for _, count, _ in course]
    workers = [size for _, _, size in course]
    first = storm["faults"][0]["at"]
    faults = [(fault["at"] - first) / 60 for fault in storm["faults"]]
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    title = f"{len(faults)} faults in {minutes[-1]:.0f} minutes: {steps[-1]:,} steps, {len(storm['lost_steps'])} lost"
    figure.suptitle(title, fontsize="large", x=0.02, ha="left")
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3.0, 1.4]})
    undisturbed = steps[-1] / storm["goodput"]
    above.plot([0, minutes[-1]], [0, undisturbed], color=GREY, linestyle="--", label="at the speed before the storm")
    above.plot(minutes, steps, color=STEPS, label=f"steps (goodput {storm['goodput']:.0%})")
    above.set_ylabel("steps")
    above.legend(loc="upper left", frameon=False)
    below.step(minutes, workers, color=WORKERS, where="post")
    below.plot(faults, [0] * len(faults), "|", color=FAULTS, markersize=8, label="a fault")
    below.set_ylim(-0.4, max(workers) + 0.6)
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_ylabel("workers")
    below.set_xlabel("minutes")
    below.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for panel in (above, below):
        panel.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/storms/results/chaos-soak.json"
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs/images/storm.png"
    document = json.loads(source.read_text())
    draw(document["raw"]["storms"][0]).savefig(target, dpi=110)
    print(f"{target} was drawn from {source}")


if __name__ == "__main__":
    main()

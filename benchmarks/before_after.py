"""Compare this checkout with another one of this project, in turns: step time, and kill → next step.

    git worktree add ../before v0.1.0
    python benchmarks/before_after.py ../before [--turns 6] [--kills 10] [--only step|kill]

Each turn runs `step_time.py` (and `recovery.py`) of either checkout in processes of its own; the order of the two
alternates. Reported are the medians over turns and the ratios "after / before" of turns next to each other. Prints a
table and writes benchmarks/results/before_after.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _harness import Series, parser, report

HERE = Path(__file__).resolve().parents[1]
MODELS = ("784-128-10", "784-512-512-10", "784-3072-2048-512-10")
PLAIN, COMMITTING = "spark_elastic", "spark_elastic, commit every step"


def run(checkout: Path, script: str, *arguments: object) -> None:
    """Run one benchmark of a checkout, with that checkout's package and nothing of the other's."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(checkout / "benchmarks" / script), *map(str, arguments)]
    done = subprocess.run(command, env=env, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} of {checkout.name} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def step_times(checkout: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds a step: model -> contender -> time. The checkout's own figures are left alone."""
    kept = checkout / "benchmarks" / "results" / "step_time.json"
    before = kept.read_bytes() if kept.exists() else None
    try:
        run(checkout, "step_time.py", "--rounds", rounds, "--models", *MODELS)
        models = json.loads(kept.read_text())["models"]
    finally:
        if before is not None:
            kept.write_bytes(before)
    return {
        model: {name: rows[name]["median_ms"] for name in ("no reduction", PLAIN, COMMITTING)}
        for model, rows in models.items()
    }


def kills(checkout: Path, repeat: int) -> list[float]:
    """Return the milliseconds from SIGKILL of one of three workers to the last survivor's next step."""
    with tempfile.TemporaryDirectory() as folder:
        run(checkout, "recovery.py", "--repeat", repeat, "--sizes", 3, "--results", folder)
        document = json.loads(next(Path(folder).glob("*.json")).read_text())
    values: list[float] = document["raw"]["to_next_step"]["3 -> 2"]
    return values


def ratios(after: list[float], before: list[float]) -> list[float]:
    return [a / b for a, b in zip(after, before, strict=True)]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("other", type=Path, help="the checkout to compare with")
    arguments.add_argument("--turns", type=int, default=6)
    arguments.add_argument("--rounds", type=int, default=20, help="of step_time.py, a turn")
    arguments.add_argument("--kills", type=int, default=10, help="of recovery.py, a turn")
    arguments.add_argument("--only", choices=["step", "kill"])
    args = arguments.parse_args()
    checkouts = {"before": args.other.resolve(), "after": HERE}
    steps: dict[str, list[dict[str, dict[str, float]]]] = {"before": [], "after": []}
    pauses: dict[str, list[list[float]]] = {"before": [], "after": []}
    for turn in range(args.turns):
        for name in ("before", "after") if turn % 2 else ("after", "before"):
            if args.only != "kill":
                steps[name].append(step_times(checkouts[name], args.rounds))
            if args.only != "step":
                pauses[name].append(kills(checkouts[name], args.kills))
        print(f"turn {turn + 1} of {args.turns} is done, load {os.getloadavg()[0]:.2f}", file=sys.stderr)
    report(
        "before_after", args, *series(steps, pauses), raw={"step_ms": steps, "kill_ms": pauses, "load": os.getloadavg()}
    )


def series(steps: dict[str, list[dict[str, dict[str, float]]]], pauses: dict[str, Any]) -> list[Series]:
    out = []
    for model in MODELS if steps["after"] else ():
        for contender in (PLAIN, COMMITTING):
            each = {name: [turn[model][contender] for turn in turns] for name, turns in steps.items()}
            out += [Series(f"{model}, {contender}, {name}", values, "ms") for name, values in each.items()]
            out.append(Series(f"{model}, {contender}, ratio", ratios(each["after"], each["before"]), "x"))
    if pauses["after"]:
        for name, turns in pauses.items():
            out.append(Series(f"kill -> next step, 3 -> 2, {name}", [ms for turn in turns for ms in turn], "ms"))
        medians = {name: [statistics.median(turn) for turn in turns] for name, turns in pauses.items()}
        out.append(Series("kill -> next step, ratio", ratios(medians["after"], medians["before"]), "x"))
    return out


if __name__ == "__main__":
    main()

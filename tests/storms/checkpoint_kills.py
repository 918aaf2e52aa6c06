"""Kill a fit, driver and all, at every operation on the files of its run, and call it again.

    python -m tests.storms.checkpoint_kills                         # 60 kills, some 25 minutes
    python -m tests.storms.checkpoint_kills --repeat 5 --loop torch

Each case is a real fit of a few epochs, on Spark in local mode with two workers, with a checkpoint after each epoch.
The worker that writes checkpoints, or the driver, is killed with SIGKILL before one of its operations on the files of
the run, drawn from all of them: opening, writing, making durable, renaming, reading back, deleting, listing. Killed as
it makes a file durable, it leaves only a part of that file, as a power cut does. The driver is always killed too, so
that nothing of the job is left. In three cases of ten, the second call is killed as well. Then the same call has to
come to the end.

It passes if each model is the exact sum of its rows over all epochs, no call did more steps again than those since the
checkpoint before the newest one (the newest may have been under way), no temporary file is left in the run's folder
(except of leases, where a rival may be writing), and no process. The exit status is 1 otherwise.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import Series, parser, report
from tests.integration.processes import GONE_S, MARK, assert_gone, marked
from tests.integration.spark.diary import Diary
from tests.integration.spark.fits import BATCH, ROWS, TOLERANCE, Framework, expected_weights

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("killed_fit") / "killed_fit.py"
FRAMEWORKS: tuple[Framework, ...] = ("torch", "keras")
EPOCHS = 4
STEPS = ROWS // BATCH
"""Steps of an epoch, and so between two checkpoints."""
KERAS = 0.3
"""The share of cases with Keras."""
DRIVER = 0.25
"""The share of kills in the driver; the others are in the worker that writes."""
TWICE = 0.3
LONGEST_S = 300.0


class Case:
    """One fit in a folder of its own, called until it ends."""

    def __init__(self, framework: Framework, folder: Path) -> None:
        self.framework, self.folder = framework, folder
        self.log = folder / "operations"
        self.diary = Diary(folder / "fit")
        self.seconds: list[float] = []
        """How long each call took until nothing was left of it."""
        (folder / "fit").mkdir()

    def call(self, who: str = "", at: int = 0, cut: float = 0.0) -> int:
        """Call `fit` in a program of its own, and wait until nothing of it is left. Returns its exit status."""
        mark, begin = uuid.uuid4().hex, time.monotonic()
        order = {"folder": str(self.folder / "fit" / "runs"), "who": who, "at": at, "cut": cut}
        order |= {"driver": str(self.folder / "driver"), "log": str(self.log)}
        path = os.pathsep.join(filter(None, [str(PROGRAM.parent), str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [str(PROGRAM), self.framework, str(self.folder / "fit"), str(EPOCHS), str(self.folder / "result")]
        with open(self.folder / "output", "ab") as output:
            status = subprocess.run(
                [sys.executable, *command],
                env={**os.environ, "KILLED_FIT": json.dumps(order), "PYTHONPATH": path, MARK: mark},
                cwd=self.folder,
                stdout=output,
                stderr=output,
                timeout=LONGEST_S,
            ).returncode
        assert_gone(lambda: marked(mark), GONE_S)
        self.seconds.append(round(time.monotonic() - begin, 1))
        return status

    def operations(self) -> Counter[str]:
        """Return the number of operations so far by process: "driver" and "worker"."""
        return Counter(line.partition(":")[0] for line in self.log.read_text().splitlines())

    def killed_at(self) -> list[str]:
        """Return the operations before which something was killed, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix("KILLED ") for line in lines if line.startswith("KILLED ")]

    def steps_done(self) -> int:
        return max((entry["step"] for entry in self.diary.read() if entry["what"] == "applied"), default=0)

    def steps_again(self, entries: int, before: int) -> int:
        """Return how many of the first `before` steps were done again after the first `entries` of the diary."""
        again = [entry["step"] for entry in self.diary.read()[entries:] if entry["what"] == "applied"]
        return max(0, before - min(again) + 1) if again else 0

    def problems(self) -> list[str]:
        """Return what is wrong with the end, in words."""
        result = json.loads((self.folder / "result").read_text())
        found, expected = np.asarray(result["weights"]), expected_weights(EPOCHS)
        wrong = []
        if result["epochs"] != EPOCHS:
            wrong.append(f"the history has {result['epochs']} epochs and not {EPOCHS}")
        if np.abs(found - expected).max() > TOLERANCE[self.framework] * np.abs(expected).max():
            wrong.append(f"the weights are {found} and not {expected}")
        left = [str(path) for path in (self.folder / "fit" / "runs").rglob("*.partial") if path.parent.name != "owners"]
        return wrong + ([f"temporary files are left: {left}"] if left else [])


def one_case(framework: Framework, counts: Counter[str], rng: random.Random) -> dict[str, Any]:
    """Kill a fit once or twice, and call it until it ends."""
    with tempfile.TemporaryDirectory(prefix="killed-fit-") as name:
        case, again, problems = Case(framework, Path(name)), [0], list[str]()
        try:
            for _ in range(2 if rng.random() < TWICE else 1):
                who = "driver" if rng.random() < DRIVER else "worker"
                entries, before, kills = len(case.diary.read()), case.steps_done(), len(case.killed_at())
                status = case.call(who, rng.randint(1, counts[who]), rng.random())
                again.append(case.steps_again(entries, before))
                if (status == -signal.SIGKILL) != (len(case.killed_at()) > kills):
                    problems.append(f"exit status {status}")
            entries, before = len(case.diary.read()), case.steps_done()
            status = case.call()
            again.append(case.steps_again(entries, before))
            if status:
                problems.append(f"the last call ended with {status}: {(case.folder / 'output').read_text()[-3000:]}")
            else:
                problems += case.problems()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            problems.append(str(error))
        if max(again) > 2 * STEPS:
            problems.append(f"{max(again)} steps were done again, and a checkpoint is written every {STEPS}")
        found = {"framework": framework, "killed": case.killed_at(), "steps_again": max(again), "problems": problems}
        return {**found, "seconds": case.seconds}


def operations_of(framework: Framework) -> Counter[str]:
    """Return how many operations the driver and the worker do if nobody is killed."""
    with tempfile.TemporaryDirectory(prefix="killed-fit-") as name:
        case = Case(framework, Path(name))
        if case.call() or case.problems():
            raise RuntimeError((case.folder / "output").read_text())
        return case.operations()


def main() -> int:
    options = parser(__doc__, repeat=50, results=Path(__file__).with_name("results"))
    options.add_argument("--loop", choices=FRAMEWORKS, help="one framework only")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    rng = random.Random(args.seed)
    counts: dict[str, Counter[str]] = {}
    cases: list[dict[str, Any]] = []
    for _ in range(2 if args.quick else args.repeat):
        framework: Framework = args.loop or ("keras" if rng.random() < KERAS else "torch")
        if framework not in counts:
            counts[framework] = operations_of(framework)
        cases.append(one_case(framework, counts[framework], random.Random(rng.random())))
        print(json.dumps(cases[-1]), flush=True)
    problems = [problem for case in cases for problem in case["problems"]]
    report(
        "checkpoint-kills",
        args,
        Series("kills", [float(len(case["killed"])) for case in cases], "kills"),
        Series("steps done again", [float(case["steps_again"]) for case in cases], "steps", target_max=2.0 * STEPS),
        Series("problems", [float(len(case["problems"])) for case in cases], "problems", target_max=0.0),
        raw={"cases": cases, "steps_between_checkpoints": STEPS},
    )
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

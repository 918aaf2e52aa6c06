"""Kill a fit, or a loop of the user's own, at every operation on the files of its run, and call it again.

    python -m tests.storms.checkpoint_kills                         # 60 kills, some 25 minutes
    python -m tests.storms.checkpoint_kills --repeat 5 --loop torch
    python -m tests.storms.checkpoint_kills --repeat 8 --loop own   # 20 kills of the driver, 20 of all workers

Each case is a real fit of a few epochs, on Spark in local mode with two workers, with a checkpoint after each epoch.
The worker that writes checkpoints, or the driver, is killed with SIGKILL before one of its operations on the files of
the run, drawn from all of them: opening, writing, making durable, renaming, reading back, deleting, listing. Killed as
it makes a file durable, it leaves only a part of that file, as a power cut does. The driver is always killed too, so
that nothing of the job is left. In three cases of ten, the second call is killed as well. Then the same call has to
come to the end.

It passes if each model is the exact sum of its rows over all epochs, no call did more steps again than those since the
checkpoint before the newest one (the newest may have been under way), no temporary file is left in the run's folder
(except of leases, where a rival may be writing), and no process. The exit status is 1 otherwise.

With `--loop own` each case is a `spark_elastic.run` with `checkpoint_dir`, whose loop commits each step; each commit is
written before the next one is made. Five calls are killed one after the other, before one of the operations on the next
seven commits: in one case the driver alone, in the next one both workers at once. Each call has to begin with the
newest commit that is complete in the folder, with the loss of one commit at most, and the end has the bits of one
process that nobody disturbs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._harness import Series, parser, report
from spark_elastic.data.store import Store
from spark_elastic.elastic.run_checkpoints import folder_of
from spark_elastic.errors import CheckpointError
from spark_elastic.runs.checkpoints import Checkpoints
from tests.integration.local import resumable_program
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
OWN = "own"
STATE_LOST = 3
"""The exit status of `killed_fit.py` whose workers were all lost."""
OWN_STEPS, OWN_KILLS = 60, 5
OWN_OPERATIONS = Counter(driver=11, worker=200)
"""Of the driver before its workers train, and of the worker that writes seven commits."""


class Case:
    """One fit, or one job with an own loop, in a folder of its own, called until it ends."""

    def __init__(self, framework: str, folder: Path) -> None:
        self.framework, self.folder = framework, folder
        self.log = folder / "operations"
        self.diary = Diary(folder / "fit")
        (folder / "fit").mkdir()

    def call(self, who: str = "", at: int = 0, cut: float = 0.0, kills: str = "both") -> int:
        """Call the job in a program of its own, and wait until nothing of it is left. Returns its exit status."""
        mark, pids = uuid.uuid4().hex, self.folder / "pids"
        shutil.rmtree(pids, ignore_errors=True)
        for role in ("driver", "worker"):
            (pids / role).mkdir(parents=True)
        order = {"folder": str(self.folder / "fit" / "runs"), "who": who, "at": at, "cut": cut, "kills": kills}
        order |= {"pids": str(pids), "log": str(self.log)}
        path = os.pathsep.join(filter(None, [str(PROGRAM.parent), str(ROOT), os.environ.get("PYTHONPATH")]))
        length = OWN_STEPS if self.framework == OWN else EPOCHS
        command = [str(PROGRAM), self.framework, str(self.folder / "fit"), str(length), str(self.folder / "result")]
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
        return status

    def operations(self) -> Counter[str]:
        """Return the number of operations so far by process: "driver" and "worker"."""
        return Counter(line.partition(":")[0] for line in self.log.read_text().splitlines())

    def killed_at(self) -> list[str]:
        """Return the operations before which something was killed, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix("KILLED ") for line in lines if line.startswith("KILLED ")]

    def written(self) -> int:
        """Return the step of the newest commit of an own loop that can be resumed; 0: there is none."""
        newest = Checkpoints(folder_of(Store.create(self.folder / "fit" / "runs" / "one"), 1)).latest()
        return newest.step if newest is not None else 0

    def begun_at(self, entries: int) -> int | None:
        """Return the step with which calls began after the first `entries` of the diary; None if they made none."""
        begun = [entry["step"] for entry in self.diary.read()[entries:] if entry["what"] == "applied"]
        return min(begun) - 1 if begun else None

    def steps_done(self) -> int:
        return max((entry["step"] for entry in self.diary.read() if entry["what"] == "applied"), default=0)

    def steps_again(self, entries: int, before: int) -> int:
        """Return how many of the first `before` steps were done again after the first `entries` of the diary."""
        begun = self.begun_at(entries)
        return 0 if begun is None else max(0, before - begun)

    def problems(self) -> list[str]:
        """Return what is wrong with the end, in words."""
        result = json.loads((self.folder / "result").read_text())
        wrong = []
        if self.framework == OWN:
            expected = {"steps": list(range(OWN_STEPS)), "weights": resumable_program.undisturbed(OWN_STEPS)}
            if result != expected:
                wrong.append(f"the end is {result} and not {expected}")
        else:
            found, sums = np.asarray(result["weights"]), expected_weights(EPOCHS)
            if result["epochs"] != EPOCHS:
                wrong.append(f"the history has {result['epochs']} epochs and not {EPOCHS}")
            if np.abs(found - sums).max() > TOLERANCE[self.framework] * np.abs(sums).max():
                wrong.append(f"the weights are {found} and not {sums}")
        left = [str(path) for path in (self.folder / "fit" / "runs").rglob("*.partial") if path.parent.name != "owners"]
        return wrong + ([f"temporary files are left: {left}"] if left else [])


def one_case(framework: str, kills: str, counts: Counter[str], rng: random.Random) -> dict[str, Any]:
    """Kill a job once or twice, and call it until it ends."""
    most = 1 if framework == OWN else 2 * STEPS
    wanted = OWN_KILLS if framework == OWN else 2 if rng.random() < TWICE else 1
    with tempfile.TemporaryDirectory(prefix="killed-fit-") as name:
        case, again, problems = Case(framework, Path(name)), [0], list[str]()

        def called(*order: Any) -> int:
            entries, before = len(case.diary.read()), case.steps_done()
            written = case.written() if framework == OWN else None
            status = case.call(*order)
            again.append(case.steps_again(entries, before))
            if written is not None and case.begun_at(entries) not in (written, None):
                problems.append(f"a call began with step {case.begun_at(entries)}, and step {written} was written")
            return status

        try:
            for _ in range(2 * wanted):
                who = "driver" if rng.random() < DRIVER and kills != "workers" else "worker"
                before = len(case.killed_at())
                if before == wanted:
                    break
                status = called(who, rng.randint(1, counts[who]), rng.random(), kills)
                killed = len(case.killed_at()) > before
                expected = (0, STATE_LOST) if kills == "workers" and killed else (-signal.SIGKILL if killed else 0,)
                if status not in expected:
                    problems.append(f"exit status {status}, and not in {expected}")
            if status := called():
                problems.append(f"the last call ended with {status}: {(case.folder / 'output').read_text()[-3000:]}")
            else:
                problems += case.problems()
        except (AssertionError, CheckpointError, subprocess.TimeoutExpired) as error:
            problems.append(str(error))
        if max(again) > most:
            problems.append(f"{max(again)} steps were done again, and {most} are the most that a call may lose")
        found = {"framework": framework, "kills": kills, "killed": case.killed_at(), "steps_again": max(again)}
        return {**found, "problems": problems}


def operations_of(framework: str) -> Counter[str]:
    """Return how many operations the driver and the worker do if nobody is killed."""
    with tempfile.TemporaryDirectory(prefix="killed-fit-") as name:
        case = Case(framework, Path(name))
        if case.call() or case.problems():
            raise RuntimeError((case.folder / "output").read_text())
        return case.operations()


def write_report(args: Any, cases: list[dict[str, Any]]) -> None:
    problems = [problem for case in cases for problem in case["problems"]]
    most = 1 if args.loop == OWN else 2 * STEPS
    series = [Series("problems", [float(len(case["problems"])) for case in cases], "problems", target_max=0.0)]
    for whom in sorted({case["kills"] for case in cases}):
        struck = [case for case in cases if case["kills"] == whom]
        again = [float(case["steps_again"]) for case in struck]
        series.append(Series(f"{whom} killed", [float(len(case["killed"])) for case in struck], "kills"))
        series.append(Series(f"{whom} killed: steps done again", again, "steps", target_max=float(most)))
    operations = Counter(operation for case in cases for operation in case["killed"])
    raw = {"killed_before": operations, "problems": problems}
    report("-".join(filter(None, ["checkpoint-kills", args.loop])), args, *series, raw=raw)


def main() -> int:
    options = parser(__doc__, repeat=50, results=Path(__file__).with_name("results"))
    options.add_argument("--loop", choices=(*FRAMEWORKS, OWN), help="one framework only, or a loop of the user's own")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    rng = random.Random(args.seed)
    counts: dict[str, Counter[str]] = {}
    cases: list[dict[str, Any]] = []
    for number in range(2 if args.quick else args.repeat):
        framework = args.loop or ("keras" if rng.random() < KERAS else "torch")
        kills = ("driver", "workers")[number % 2] if framework == OWN else "both"
        if framework not in counts:
            counts[framework] = OWN_OPERATIONS if framework == OWN else operations_of(framework)
        cases.append(one_case(framework, kills, counts[framework], random.Random(rng.random())))
        print(json.dumps(cases[-1]), flush=True)
    write_report(args, cases)
    return int(any(case["problems"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())

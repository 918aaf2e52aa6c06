"""Elastic training compared with its peers: the times of a recovery, a start, a step and a newcomer, in one run.

    python benchmarks/peers.py
    python benchmarks/peers.py --horovod-python horovod-env/bin/python --peers-python peers-env/bin/python
    python benchmarks/peers.py --add --repeat 1 ...      # further repetitions into the same file

Two workers train the same model. Each repetition runs every contender once, in turns: a start, 150 to 199 undisturbed
steps, a SIGKILL of one worker, and a newcomer. All figures come from the lines that the workers write at each step, by
one clock (`_peer_training.py`):

- start: from the call (or the command) to the first step of the last worker;
- step: the median distance of the undisturbed steps;
- first line: from the signal to the first line of a program that starts again, before its imports;
- next step: from the signal to the first step of the training that goes on, by whoever does it;
- as far as before: from the signal until the step is done that comes after the last one before the signal; where steps
  have to be done again, this is later;
- newcomer: the longest time between two steps of the training while it comes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _contenders
from _contenders import Contender
from _harness import Series, parser, report
from _peer_training import CHECKPOINT_EVERY

from tests.integration import clusters

UNDISTURBED = 150
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Line:
    pid: int
    size: int
    rank: int
    step: int
    at: float


class Lines:
    """What the workers of one training have written."""

    def __init__(self, folder: Path, contender: Contender) -> None:
        self._folder = folder
        self._contender = contender

    def read(self) -> list[Line]:
        """All whole lines, by time."""
        found = []
        for path in self._folder.glob("*.steps"):
            text = path.read_text()
            for line in text[: text.rfind("\n") + 1].splitlines():
                size, rank, step, at = line.split()
                found.append(Line(int(path.stem), int(size), int(rank), int(step), float(at)))
        return sorted(found, key=lambda line: line.at)

    def wait(self, condition: Callable[[list[Line]], Any], what: str) -> Any:
        until = time.monotonic() + TIMEOUT_S
        while not (found := condition(self.read())):
            self._contender.check()
            if time.monotonic() > until:
                raise TimeoutError(f"{what}: not within {TIMEOUT_S} s")
            time.sleep(0.1)  # rarely: it runs beside the training
        return found


def start_and_kill(contender: Contender, folder: Path) -> dict[str, float]:
    lines = Lines(folder, contender)
    asked = contender.launch(folder, 2)
    both = lines.wait(lambda read: (p := _workers(read, 2)) and len(p) == 2 and p, "two workers")
    figures = {"start_s": max(line.at for line in both.values()) - asked}
    begun = max(line.step for line in both.values())
    until = begun + UNDISTURBED + random.randrange(CHECKPOINT_EVERY)  # at any distance from a checkpoint
    old = lines.wait(lambda read: read[-1].step >= until and read, f"{until} steps")
    quiet = [line.at for line in old if line.rank == 0 and line.size == 2 and line.step > begun + 10]
    figures["step_ms"] = statistics.median(b - a for a, b in itertools.pairwise(quiet)) * 1000

    known = {line.pid for line in old}
    victim = next(line.pid for line in reversed(old) if line.rank == 1 and line.size == 2)
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def fresh(read: list[Line]) -> list[Line]:
        """Return the steps after the kill: in another world, or by a new process."""
        return [line for line in read if line.at > killed and (line.size != 2 or line.pid not in known)]

    first = lines.wait(fresh, "the next step")[0]
    before = max(line.step for line in lines.read() if line.at < first.at and line not in (first,))
    caught = lines.wait(lambda read: [line for line in fresh(read) if line.step > before], "as far as before")[0]
    figures["next_step_s"] = first.at - killed
    begun = sorted(float(path.read_text()) for path in folder.glob("*.begun"))
    if later := [at for at in begun if at > killed]:
        figures["first_line_s"] = later[0] - killed
    figures["as_far_as_before_s"] = caught.at - killed
    figures["steps_again"] = before + 1 - first.step
    if contender.shrinks:
        contender.add()
        figures.update(_joined(lines, killed))
    return figures


def join(contender: Contender, folder: Path) -> dict[str, float]:
    """A newcomer for a training that began alone."""
    lines = Lines(folder, contender)
    contender.launch(folder, 1)
    lines.wait(lambda read: read and read[-1].step >= UNDISTURBED, "steps of the first worker")
    contender.add()
    return _joined(lines, 0.0)


def _joined(lines: Lines, after: float) -> dict[str, float]:
    def grown(read: list[Line]) -> Any:
        """From the first step alone to some steps after the first one together, once there are such."""
        alone = next((line for line in read if line.at > after and line.size == 1), None)
        together = [line for line in read if alone and line.at > alone.at and line.size == 2]
        return len(together) > 20 and (alone, together[0], [line for line in read if line.at >= alone.at])

    _, first, all_ = lines.wait(grown, "the newcomer's first steps")
    pause = max(b.at - a.at for a, b in itertools.pairwise(all_))
    last = [line for line in all_ if line.at < first.at and line.size == 1][-1]
    return {"newcomer_s": pause, "newcomer_steps_again": last.step + 1 - first.step}


def _workers(read: list[Line], size: int) -> dict[int, Line]:
    """The first line of each rank in a world of this size."""
    firsts: dict[int, Line] = {}
    for line in read:
        if line.size == size:
            firsts.setdefault(line.rank, line)
    return firsts


def measure(contender: Contender) -> dict[str, Any]:
    figures: dict[str, Any] = {"load_1min": round(os.getloadavg()[0], 2)}
    parts = [start_and_kill] + ([join] if contender.grows and not contender.shrinks else [])
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder:
            try:
                figures.update(part(contender, Path(folder)))
            except Exception as error:
                logs = "".join(path.read_text()[-1500:] for path in sorted(Path(folder).glob("*.log")))
                print(f"{contender.name}: {error!r}\n{logs}", file=sys.stderr)
                figures[f"failed {part.__name__}"] = repr(error)
            finally:
                contender.stop()
    return figures


def versions(python: str, *packages: str) -> dict[str, str]:
    code = f"import json, importlib.metadata as m; print(json.dumps({{p: m.version(p) for p in {packages}}}))"
    found: dict[str, str] = json.loads(subprocess.check_output([python, "-c", code], text=True))
    return found


KINDS = {
    "start_s": ("call -> first step", "s"),
    "step_ms": ("step", "ms"),
    "first_line_s": ("SIGKILL -> first line of the new program", "s"),
    "next_step_s": ("SIGKILL -> next step", "s"),
    "as_far_as_before_s": ("SIGKILL -> as far as before", "s"),
    "steps_again": ("steps done again after SIGKILL", "steps"),
    "newcomer_s": ("newcomer: the others' pause", "s"),
    "newcomer_steps_again": ("newcomer: steps done again", "steps"),
}


def main() -> None:
    arguments = parser(__doc__, repeat=5)
    arguments.add_argument("--horovod-python", metavar="PATH", help="an interpreter with Horovod (see README.md)")
    arguments.add_argument("--peers-python", metavar="PATH", help="an interpreter with Ray Train and torchft")
    arguments.add_argument("--only", nargs="+", metavar="NAME", help="some of the contenders")
    arguments.add_argument("--add", action="store_true", help="add to the measurements of the last run")
    args = arguments.parse_args()
    repeat = 1 if args.quick else args.repeat
    last = args.results / "peers.json"
    raw: dict[str, Any] = json.loads(last.read_text())["raw"] if args.add and last.exists() else {}
    runs: dict[str, list[dict[str, Any]]] = raw.setdefault("runs", {})
    found: dict[str, str] = raw.setdefault("versions", {})
    with ExitStack() as stack:
        cluster = stack.enter_context(clusters.local_cluster(2, 1))
        cluster.sc.parallelize(range(2), 2).map(lambda x: x).collect()  # warm: executors and their Python daemons
        all_ = [
            _contenders.SparkElastic(cluster.spark),
            _contenders.SparkElasticRestart(cluster.spark),
            _contenders.Torchrun(),
            _contenders.TorchDistributor(cluster.spark),
        ]
        if args.horovod_python:
            all_.append(_contenders.Horovod(args.horovod_python))
            found.update(versions(args.horovod_python, "horovod"))
        if args.peers_python:
            all_ += [_contenders.RayTrain(args.peers_python), _contenders.Torchft(args.peers_python)]
            found.update(versions(args.peers_python, "ray", "torchft-nightly"))
        taken = [one for one in all_ if not args.only or one.name in args.only]
        raw["settings"] = {**raw.get("settings", {}), **{one.name: one.settings for one in taken}}
        done = max(map(len, runs.values()), default=0)
        for number in range(done, done + repeat):
            first = number % len(taken)  # another one each time
            for contender in [*taken[first:], *taken[:first]]:
                runs.setdefault(contender.name, []).append(measure(contender))
                last.parent.mkdir(parents=True, exist_ok=True)
                last.write_text(json.dumps({"raw": raw}))  # so that a run that is broken off can be added to
                print(contender.name, json.dumps(runs[contender.name][-1]), file=sys.stderr)
    series = [
        Series(f"{what}, {name}", values, unit)
        for kind, (what, unit) in KINDS.items()
        for name, figures in runs.items()
        if (values := [one[kind] for one in figures if kind in one])
    ]
    report("peers", args, *series, raw=raw)


if __name__ == "__main__":
    main()

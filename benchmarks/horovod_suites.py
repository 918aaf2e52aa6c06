"""Horovod's own test files, run on this package: which of its tests pass, fail and are skipped.

    git clone https://github.com/horovod/horovod
    python benchmarks/horovod_suites.py horovod [--suite test_torch.py ...] [--only test_horovod_allreduce ...]

Each rank of a job of two local workers runs the file with pytest, test by test, with Horovod's modules standing for
ours (`_horovod_names`). A test passes if it passes on both ranks. When one fails, the job is started anew for the tests
that are left, because its ranks may have called different collectives; when one hangs, the job is ended after
`--timeout` seconds, or soon after the first rank is done with it, and that one test has failed.

Keras 3 gets some names of Keras 2 first, which the tests are written with (`give_keras_2_names`).
TensorFlow's tests run eagerly: their second run, in graphs with sessions, is left out, which TensorFlow 2 has no other
use for. Needs pytest, packaging and parameterized.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _harness import RESULTS, machine, table

SUITES = ("test_torch.py", "test_tensorflow.py", "test_tensorflow2_keras.py")
GRACE_S = 15.0
"""Seconds that the other ranks may take for a test after the first rank has finished it."""
NOT_PASSED = ("failed", "hung", "died")


# --- in a worker ------------------------------------------------------------------------------------


class Reporter:
    """A pytest plugin: runs the wanted tests in step with the other ranks, and writes what became of each."""

    def __init__(self, folder: Path, rank: int, size: int, only: list[str], done: set[str]) -> None:
        self._own = folder / f"{rank}.jsonl"
        self._others = [folder / f"{other}.jsonl" for other in range(size) if other != rank]
        self._only, self._done = only, done
        self._failed = False
        self._own.touch()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        wanted = [item for item in items if not self._only or any(name in item.name for name in self._only)]
        self._write("tests", names=[item.name for item in wanted])
        items[:] = [item for item in wanted if item.name not in self._done]

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self._write("unreadable", why=str(report.longrepr)[-1500:])

    def pytest_runtest_setup(self, item: Any) -> None:
        self._write("begin", test=item.name)
        self._meet("begin", item.name)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write("end", test=report.location[2].rpartition(".")[2], outcome=report.outcome, why=_why(report))
            self._failed |= report.outcome == "failed"

    def pytest_runtest_teardown(self, item: Any, nextitem: Any) -> None:
        outcomes = self._meet("end", item.name)
        if self._failed or "failed" in outcomes:
            item.session.shouldstop = "the ranks may have called different collectives"

    def _write(self, event: str, **what: Any) -> None:
        with self._own.open("a") as file:
            file.write(json.dumps({"event": event, **what}) + "\n")

    def _meet(self, event: str, test: str) -> list[str]:
        """Wait until the others have written the same; their outcomes. The launching process ends a wait for good."""
        outcomes = []
        for path in self._others:
            while True:
                found = [one for one in records(path) if one["event"] == event and one.get("test") == test]
                if found:
                    outcomes.append(found[0].get("outcome", ""))
                    break
                time.sleep(0.01)
        return outcomes


def records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _why(report: Any) -> str:
    if report.outcome == "skipped":
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.outcome == "passed" else str(crash or report.longrepr)[:2000]


def run_rank(suite: str, folder: str, only: list[str], done: list[str], details: bool) -> int:
    import _horovod_names
    import pytest

    _horovod_names.install()
    if "tensorflow" in suite or "keras" in suite:
        from tensorflow.python.framework import test_util

        import spark_elastic.tensorflow as hvd

        test_util.run_all_in_graph_and_eager_modes = lambda cls: cls
        _horovod_names.give_keras_2_names()
    else:
        import spark_elastic.torch as hvd
    hvd.init()
    _horovod_names.tell_position(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    plugin = Reporter(Path(folder), hvd.rank(), hvd.size(), only, set(done))
    style = "long" if details else "short"
    options = ["-q", f"--tb={style}", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(Path(suite).parent)]
    return int(pytest.main([suite, *options], plugins=[plugin]))


# --- in the launching process -----------------------------------------------------------------------


def run_suite(suite: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What became of each test, by its name."""
    results: dict[str, dict[str, Any]] = {}
    names: list[str] = []
    starts_without_tests = 0
    while starts_without_tests < 2 and (not names or len(results) < len(names)):
        with tempfile.TemporaryDirectory() as folder:
            before = len(results)
            _run_once(suite, Path(folder), args, results)
            for one in records(Path(folder) / "0.jsonl"):
                if one["event"] == "unreadable":
                    raise SystemExit(f"{suite} cannot be imported:\n{one['why']}")
                names = one["names"] if one["event"] == "tests" else names
        starts_without_tests = 0 if len(results) > before else starts_without_tests + 1
    return {name: results.get(name, {"outcome": "died", "why": "never begun"}) for name in names}


def _run_once(suite: Path, folder: Path, args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    from spark_elastic import LocalLauncher, run_async

    files = [folder / f"{rank}.jsonl" for rank in range(args.np)]
    output = (folder / "output").open("w+")
    job = run_async(
        run_rank,
        (str(suite.resolve()), str(folder), args.only, list(results), args.details),
        num_proc=args.np,
        launcher=LocalLauncher(),
        reset_limit=0,
        verbose=0,
        stdout=sys.stdout if args.details else output,
        stderr=sys.stderr if args.details else output,
    )
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    running = ""
    why = "died"
    try:
        while not job.done():
            time.sleep(0.1)
            now = time.monotonic()
            running = _take_in(files, results, began, ended, now)
            if not running:
                continue
            late = now - ended[running] > GRACE_S if running in ended else False
            if late or now - began[running] > args.timeout:
                why = "hung"
                break
        running = _take_in(files, results, began, ended, time.monotonic())
    finally:
        job.cancel("a test hangs")
        output.seek(0)
        tail = output.read()[-1500:]
        output.close()
    if running:
        told = [one for path in files for one in records(path) if one.get("test") == running and "outcome" in one]
        if told and why == "hung":
            tail = f"after {told[0]['outcome']} on another rank: {told[0]['why']}"
        elif why == "hung":
            tail = "on all ranks"
        results[running] = {"outcome": why, "why": tail}
        print(f"{why:8} {running}", flush=True)


def _take_in(
    files: list[Path],
    results: dict[str, dict[str, Any]],
    began: dict[str, float],
    ended: dict[str, float],
    now: float,
) -> str:
    """Add what all ranks have finished; the test that some have not, or ""."""
    told: dict[str, dict[int, dict[str, Any]]] = {}
    open_tests: list[str] = []
    for rank, path in enumerate(files):
        for one in records(path):
            if one["event"] == "begin":
                open_tests.append(one["test"])
                began.setdefault(one["test"], now)
            elif one["event"] == "end":
                told.setdefault(one["test"], {}).setdefault(rank, one)
                ended.setdefault(one["test"], now)
    for name, by_rank in told.items():
        if len(by_rank) == len(files) and name not in results:
            outcomes = [one["outcome"] for one in by_rank.values()]
            worst = "failed" if "failed" in outcomes else "passed" if "passed" in outcomes else "skipped"
            results[name] = {"outcome": worst, "why": next(o["why"] for o in by_rank.values() if o["outcome"] == worst)}
            print(f"{worst:8} {name}", flush=True)
    return next((name for name in open_tests if name not in results), "")


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("checkout", type=Path, nargs="?", help="a checkout of Horovod")
    made.add_argument("--suite", nargs="+", default=SUITES, metavar="FILE", help="files in test/parallel (%(default)s)")
    made.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="tests whose name has one of these in it")
    made.add_argument("--np", type=int, default=2, help="workers (%(default)s)")
    made.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds for one test (%(default)s)")
    made.add_argument("--details", action="store_true", help="show what pytest prints, with whole tracebacks")
    made.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON file goes")
    args = made.parse_args()
    if args.checkout is None:
        print("left out: it needs the path of a checkout of Horovod")
        return
    path = args.results / "horovod_suites.json"
    document = json.loads(path.read_text()) if path.exists() else {"benchmark": "horovod_suites", "suites": {}}
    rows = []
    for name in args.suite:
        print(f"\n{name}", flush=True)
        found = run_suite(args.checkout / "test" / "parallel" / name, args)
        counts = Counter(one["outcome"] for one in found.values())
        ran = sum(counts.values()) - counts["skipped"]
        rows.append([name, f"{counts['passed']} of {ran}", *(counts[each] for each in (*NOT_PASSED, "skipped"))])
        for test, one in found.items():
            if one["outcome"] in NOT_PASSED:
                print(f"\n{one['outcome']}: {test}\n    {one['why'][:600]}")
        outcomes = {test: one["outcome"] for test, one in found.items()}
        document["suites"][name] = {"counts": dict(counts), "np": args.np, "tests": outcomes}
    print("\n" + table(["file", "passed", *NOT_PASSED, "skipped"], rows))
    if not args.only:
        document["machine"] = machine()
        args.results.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()

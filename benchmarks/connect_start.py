"""From the call of `run` to the first optimizer step: through Spark Connect, in turns with a classic session.

Both have a local-cluster of two executors with a slot each, and are warm: one job has run before.

python benchmarks/connect_start.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _harness import Series, parser, report

from tests.integration import clusters
from tests.integration.connect.server import ConnectServer

ROOT = Path(__file__).resolve().parents[1]
_SECONDS = "seconds "


def measure(spark: Any) -> None:
    """Print the seconds of a run for each line of standard input; the first one, which warms up, is not asked for."""
    import cloudpickle
    import start

    cloudpickle.register_pickle_by_value(start)  # executors do not have this folder
    start.one_call(spark, None)["first step"]
    print(_SECONDS, flush=True)
    for _ in sys.stdin:
        print(_SECONDS, start.one_call(spark, None)["first step"], flush=True)


def serve(remote: str | None) -> None:
    if remote is None:
        with clusters.local_cluster(2, 1) as cluster:
            measure(cluster.spark)
        return
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote(remote).getOrCreate()
    measure(spark)
    spark.stop()


class Program:
    """A program with one session, because a process cannot have sessions of both kinds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answer()

    def first_step(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_SECONDS):
                return line.removeprefix(_SECONDS)
        raise RuntimeError(f"the program ended with {self._process.wait()}")


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", *arguments]
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Program(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def main() -> None:
    arguments = parser(__doc__, repeat=7)
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--remote", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.serve:
        return serve(args.remote)
    through, classic = [], []
    with (
        ConnectServer("local-cluster[2,1,1024]") as server,
        program("--remote", server.url) as connected,
        program() as classical,
    ):
        for _ in range(2 if args.quick else args.repeat):
            through.append(connected.first_step())
            classic.append(classical.first_step())
            print(f"Spark Connect {through[-1]:.2f} s, classic {classic[-1]:.2f} s", file=sys.stderr)
    report(
        "connect-start",
        args,
        Series("Spark Connect: run -> first step", through, "s"),
        Series("classic: run -> first step", classic, "s"),
        Series("difference of neighbours", [a - b for a, b in zip(through, classic, strict=True)], "s"),
        raw={"connect": through, "classic": classic},
    )
    return None


if __name__ == "__main__":
    main()

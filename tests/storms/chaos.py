"""Strike a training with hundreds of faults, from a seed, and judge what is left of it.

    python -m tests.storms.chaos                                    # five minutes, each site and each loop in turn
    python -m tests.storms.chaos --on standalone --loop sampler --faults 500
    python -m tests.storms.chaos --on processes --loop exact --seconds 3600 --gap 10
    python -m tests.storms.chaos --on processes --loop exact --seed 7 --first 41 --faults 1     # one fault again

Sites: `processes` (the local launcher, two loopback addresses as hosts), `standalone` (a Spark Master and Workers) and
`namespaces` (the same, each Worker in a network namespace with a link of its own; needs root and `ip`).

Loops: `sampler` reads its rows through an `ElasticSampler`: each row has to be used exactly once an epoch. `exact` has
commits, schedules, broadcasts, accumulated gradients, skipped steps and averages kept by hand, drawn from the seed; its
weights do not depend on the number of workers, and have to be those of an undisturbed run, to the last bit. `torch` and
`keras` are fits of the estimators: each row adds its own whole numbers to the weights, once an epoch.

A storm leaves at least one worker of each world alone, so that the state is never lost. It passes if no applied step
was lost, all replicas were equal in each world, the result is right and nothing is left: no process, no thread, no
descriptor, no file, no Spark job. The exit status is 1 otherwise. A fault is known by the storm's seed and its number.

In `sampler`, `torch` and `keras` no worker may apply a step twice. `exact` has collectives of its own. If one of them
is interrupted, it repeats the steps since its last commit, and no more than these (docs/elasticity.md).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from pyspark.sql import SparkSession

import spark_elastic
from benchmarks._harness import Series, parser, report
from spark_elastic.membership.timeline import WorldStarted
from tests.integration import clusters, network
from tests.integration.local import random_kills
from tests.integration.processes import GONE_S, assert_gone, our_processes, wait_until
from tests.integration.spark import training
from tests.integration.spark.diary import Diary, Entry
from tests.integration.spark.fits import Fit, Framework
from tests.leftovers import Before
from tests.storms.chaos_faults import FAULTS, Fault, Site, Strike, fault_of, kinds_on
from tests.storms.chaos_judge import Verdict, shared_files, verdict_of
from tests.storms.wall_clock import CLOCK, shifted_clock

ROOT = Path(__file__).resolve().parents[2]
SITES = ("processes", "standalone", "namespaces")
FITS: tuple[Framework, ...] = ("torch", "keras")
LOOPS = ("sampler", "exact", *FITS)
HEARTBEAT_TIMEOUT_S = 4.0
SHORT = [
    ("processes", "exact"),
    ("processes", "torch"),
    ("standalone", "sampler"),
    ("standalone", "keras"),
    ("namespaces", "exact"),
    ("namespaces", "sampler"),
]
"""The storms of `--short`: each site and each loop."""
WORKERS = {"processes": (3, 4), "standalone": (2, 3), "namespaces": (2, 3)}
"""How many workers a storm starts with, and how many it may have."""
QUIET_S = 8.0
"""How long a training is left alone first."""
HANG_S = 120.0
"""A storm has failed if no world trains for so long."""
EXACT_PAUSE_S = 0.02


class Hang(AssertionError):
    """The training stands still."""


@contextlib.contextmanager
def without_shifted_clock() -> Iterator[None]:
    """Start processes with the machine's own clock: Spark's JVM ends itself when the time has jumped by hours."""
    preload = os.environ.pop("LD_PRELOAD", None)
    try:
        yield
    finally:
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload


@contextlib.contextmanager
def site_of(on: str, loop: str) -> Iterator[Any]:
    """The Spark cluster of a site; None: it has none, but a local session that writes the rows of a fit."""
    hosts = WORKERS[on][1]
    if on == "processes" and loop in FITS:
        builder = SparkSession.builder.master("local[1]").config("spark.ui.showConsoleProgress", "false")
        with without_shifted_clock():
            session = builder.getOrCreate()
        with session:
            yield None
    elif on == "processes":
        yield None
    elif on == "standalone":
        with clusters.standalone(workers=hosts, cores=1, decommission=True) as cluster:
            yield cluster
    else:
        if reason := network.why_unavailable():
            raise SystemExit(reason)
        with clusters.namespaced(workers=hosts, cores=1, decommission=True) as cluster:
            yield cluster


def start_job(loop: str, seed: int, folder: Path, on: str, cluster: Any) -> Any:
    """Start the training that is to be struck."""
    num_proc, max_num_proc = WORKERS[on]
    sizes = {"num_proc": num_proc, "min_num_proc": 1, "max_num_proc": max_num_proc}
    settings: dict[str, Any] = {
        "heartbeat_timeout": HEARTBEAT_TIMEOUT_S,
        "cooldown_range": (0.05, 1.0),
        "start_timeout": 300,
        "elastic_timeout": 300,
    }
    if cluster is None:
        preimport = ("tensorflow" if loop == "keras" else "torch",)
        settings["launcher"] = spark_elastic.LocalLauncher(hosts=("127.0.0.1", "127.0.0.2"), preimport=preimport)
    if loop in FITS:
        spark = cluster.spark if cluster is not None else SparkSession.getActiveSession()
        return Fit(cast(Framework, loop), spark, folder, run_options=settings, **sizes)
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    if loop == "sampler":
        rng = random.Random(seed)
        function, arguments = training.train, (str(folder), rng.choice([0, 300_000]), rng.choice([0, 1, 3]))
    else:
        function = functools.partial(random_kills.train, epochs=None)
        arguments = (seed, str(folder), EXACT_PAUSE_S)
    return spark_elastic.run_async(
        function, arguments, verbose=0, spark=cluster.spark if cluster is not None else None, **sizes, **settings
    )


def world_for(site: Site, job: Any, needs: int) -> dict[int, Entry] | None:
    """Wait for a world whose members have all applied a step and none of which was struck.

    Returns: its members by rank; None: it stays smaller than `needs`.
    """
    until = time.monotonic() + HANG_S
    most = 0
    while time.monotonic() < until:
        if job.done():
            job.result(0)
            raise AssertionError("the training ended in the middle of the storm")
        world = site.diary.newest()
        one = next(iter(world.values()), None)
        if one is not None and len(world) == one["size"] and not any(site.is_struck(e["pid"]) for e in world.values()):
            most = max(most, len(world))
            if len(world) >= needs:
                return world
        time.sleep(0.01)
    if most == 0:
        raise Hang(f"no world trained for {HANG_S:g} s: {job.status()}")
    return None


def strike(site: Site, job: Any, fault: Fault) -> str:
    """Wait for a world, and strike it. Returns: what was done, in words; "": the fault had no target."""
    kind = FAULTS[fault.kind]
    if world_for(site, job, kind.needs) is None:
        return ""
    time.sleep(fault.gap_s)
    world = world_for(site, job, kind.needs)
    if world is None:
        return ""
    members = [world[rank] for rank in sorted(world)]
    random.Random(fault.draws[5]).shuffle(members)
    spared, *victims = members
    kind.do(Strike(site, fault, spared, victims or [spared]))
    ranks = ", ".join(str(victim["rank"]) for victim in victims[:2])
    return f"{fault.kind}: rank {ranks or spared['rank']} of {len(world)} in round {spared['round']}"


def rage(site: Site, job: Any, args: Any, on: str, seed: int, done: list[dict[str, Any]]) -> None:
    """Strike until the time or the number of faults is reached; each fault is added to `done`."""
    kinds = args.kinds or kinds_on(on)
    until = time.monotonic() + args.seconds
    number = args.first
    while len(done) < args.faults and time.monotonic() < until:
        fault = fault_of(seed, number, kinds, args.gap)
        at = time.monotonic()
        words = strike(site, job, fault)
        site.settle()
        if words:
            done.append({"number": number, "kind": fault.kind, "at": at})
            print(f"{on} {seed}/{number}: {words}", flush=True)
        number += 1


def undisturbed(seed: int, epochs: int) -> str:
    """What the loop `exact` comes to in one process that nobody strikes."""
    program = (
        f"from tests.integration.local.random_kills import train\nprint(train({seed}, None, 0.0, epochs={epochs}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip()


def problems_of(loop: str, seed: int, job: Any, diary: Diary, results: Any) -> list[str]:
    """Return what is wrong with the end of a training, and with the way to it."""
    try:
        if loop == "sampler":
            diary.check(job, results)
            return []
        if loop in FITS:
            diary.check_steps()
            return job.problems()
    except AssertionError as error:
        return [str(error)]
    found = [path.read_text() for path in diary.folder.glob("diverged-*")]
    expected = undisturbed(seed, results[0][2])
    return [*found, *(f"{result} and not {expected}" for result in set(map(str, results)) if result != expected)]


def left_behind(cluster: Any, before: Before, files: set[str], *, with_spark: bool) -> list[str]:
    """Return what a job has left, after a moment; with Spark in this process, descriptors are left out."""
    problems = []
    checks: list[Callable[[], object]] = [
        lambda: assert_gone(our_processes, GONE_S),
        before.assert_no_threads_left if with_spark else before.assert_nothing_left,
        lambda: wait_until(lambda: shared_files() <= files, GONE_S, f"files: {shared_files() - files}"),
    ]
    if cluster is not None:
        tracker = cluster.sc.statusTracker()
        checks.append(lambda: wait_until(lambda: not tracker.getActiveJobsIds(), GONE_S, "no Spark job runs"))
    for check in checks:
        try:
            check()
        except AssertionError as error:
            problems.append(str(error))
    return problems


def storm(on: str, loop: str, seed: int, args: Any) -> tuple[Verdict, list[dict[str, Any]]]:
    """One storm over one training."""
    with site_of(on, loop) as cluster, tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        before, files = Before(), shared_files()
        diary = Diary(folder)
        site = Site(diary, HEARTBEAT_TIMEOUT_S, cluster)
        job = start_job(loop, seed, folder, on, cluster)
        done: list[dict[str, Any]] = []
        problems: list[str] = []
        began = ended = time.monotonic()
        results: Any = None
        try:
            if world_for(site, job, WORKERS[on][0]) is None:
                raise Hang(f"{WORKERS[on][0]} workers never trained")
            time.sleep(QUIET_S)
            began = time.monotonic()
            try:
                rage(site, job, args, on, seed, done)
            finally:
                ended = time.monotonic()
                site.close()
            (folder / "finish").touch()
            results = job.result(HANG_S)
        except Exception as error:  # a verdict too: the storm's number and its faults go with it
            problems.append(f"{type(error).__name__}: {error}")
        finally:
            job.cancel()
        if results is not None:
            problems += problems_of(loop, seed, job, diary, results)
        problems += left_behind(cluster, before, files, with_spark=cluster is not None or loop in FITS)
        applied = [entry for entry in diary.read() if entry["what"] == "applied"]
        worlds = (
            len({entry["round"] for entry in applied})  # a world without a step is not seen here
            if isinstance(job, Fit)
            else sum(isinstance(each, WorldStarted) for each in job.timeline())
        )
        if problems and not isinstance(job, Fit):
            print("the job's last events:", *job.timeline()[-80:], sep="\n  ", flush=True)
        allowed = 2 * random_kills.loop_of(seed).commit_every if loop == "exact" else 0
        return verdict_of(applied, allowed, worlds, began, ended, problems), done


def in_words(verdict: Verdict, faults: int) -> str:
    """Return the line of a storm, and one for each thing that must not be."""
    line = (
        f"{faults} faults, {verdict.worlds} worlds, {verdict.steps} steps, {verdict.repeated_steps} repeated, "
        f"goodput {verdict.goodput:.1%}, of live workers {verdict.live_goodput:.1%}, "
        f"worst stall {verdict.worst_stall_s} s"
    )
    return "\n  PROBLEM: ".join([line, *verdict.lost_steps, *verdict.problems])


def main() -> int:
    arguments = parser(__doc__, repeat=1, results=Path(__file__).with_name("results"))
    arguments.add_argument("--on", choices=SITES, help="one site only")
    arguments.add_argument("--loop", choices=LOOPS, help="one loop only")
    arguments.add_argument("--seed", type=int, default=1, help="of the first storm (%(default)s)")
    arguments.add_argument("--faults", type=int, default=10**9, help="most faults of a storm")
    arguments.add_argument("--seconds", type=float, help="length of a storm; 40 unless --faults is given")
    arguments.add_argument(
        "--gap", type=float, default=0.7, help="mean seconds from a world to its fault (%(default)s)"
    )
    arguments.add_argument("--first", type=int, default=1, help="number of the first fault")
    arguments.add_argument(
        "--short", action="store_true", help="six storms of 15 s each, over all sites and loops; five minutes"
    )
    arguments.add_argument("--kinds", nargs="+", choices=list(FAULTS), help="these kinds only")
    args = arguments.parse_args()
    if CLOCK not in os.environ and args.on in (
        None,
        "processes",
    ):  # this process drives the jobs: it needs the clock, too
        with shifted_clock(ROOT / "build" / "chaos") as added:
            if added:
                return subprocess.run([sys.executable, *sys.orig_argv[1:]], env={**os.environ, **added}).returncode
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="chaos-")  # no files of other programs are in it
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # of workers
    os.environ["PYSPARK_PYTHON"] = sys.executable  # a session reads it as its JVM starts, which serves all storms
    if args.seconds is None:
        args.seconds = float("inf") if args.faults < 10**9 else 15.0 if args.short else 40.0
    storms: list[dict[str, Any]] = []
    sites = [site for site in SITES if site != "namespaces" or not network.why_unavailable()]
    chosen = SHORT if args.short else [(on, loop) for on in SITES for loop in LOOPS]
    for repetition in range(args.repeat):
        for on, loop in chosen:
            if on in ([args.on] if args.on else sites) and loop in ([args.loop] if args.loop else LOOPS):
                seed = args.seed + repetition
                verdict, done = storm(on, loop, seed, args)
                storms.append({"on": on, "loop": loop, "seed": seed, "faults": done, **verdict.document()})
                print(f"{on}, {loop}, seed {seed}: {in_words(verdict, len(done))}", flush=True)
    kinds = Counter(fault["kind"] for each in storms for fault in each["faults"])
    series = [
        Series("faults", [float(len(each["faults"])) for each in storms], "faults"),
        Series(
            "times that applied steps were lost",
            [float(len(each["lost_steps"])) for each in storms],
            "times",
            target_max=0.0,
        ),
        Series("problems", [float(len(each["problems"])) for each in storms], "problems", target_max=0.0),
        Series("goodput", [100 * each["goodput"] for each in storms], "%"),
        Series("goodput of live workers", [100 * each["live_goodput"] for each in storms], "%"),
        Series("worst stall", [each["worst_stall_s"] for each in storms], "s"),
    ]
    if stalls := [stall for each in storms for stall in each["stalls_s"]]:
        series.append(Series("from a world's last step to the next one's first", stalls, "s"))
    name = "-".join(["chaos", *filter(None, [args.on, args.loop])])
    report(name, args, *series, raw={"kinds": dict(kinds), "storms": storms})
    return int(any(each["problems"] or each["lost_steps"] for each in storms))


if __name__ == "__main__":
    sys.exit(main())

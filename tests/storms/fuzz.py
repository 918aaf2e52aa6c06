"""Attack a job's port, and every kind of file that is read, with a million hostile frames and hundred thousand files.

    python -m tests.storms.fuzz                                # a quarter of an hour
    python -m tests.storms.fuzz --only documents --documents 500000 --seed 7
    python -m tests.storms.fuzz --frames 20000 --documents 3000

`frames`: a real driver with two workers that train, whose process may open 1024 descriptors. Strangers send malformed,
truncated, oversized, replayed, reordered and altered frames, proofs of another key, and with the right key frames that
are no messages, as fast as they are judged. Each is one connection that the driver has to close. Then connections are
opened up to the limit and left idle, while a peer that holds the key has to get in.

`documents`: manifests of datasets, metadata of checkpoints, and metadata of saved models, most of them with a checksum
that is right, are opened as a user would open them.

It passes if no process crashed, every error was one of this package, nothing was left (memory, descriptors, threads),
the membership has not changed, and the job's workers ended with equal weights. The exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks._harness import Series, parser, report
from spark_elastic.wire.channel import connect
from tests.storms.attacked_job import AttackedJob, attacked_job, difference
from tests.storms.hostile_documents import attack_documents
from tests.storms.hostile_frames import Stranger, attempts
from tests.storms.hostile_judge import Findings

PARTS = ("frames", "documents")
DESCRIPTORS = 1024
IDLE = 900
"""Connections that are left idle: more than are admitted, and about as many as there may be descriptors."""
IDLE_S = 20.0
GROWTH_MIB = 64.0


def flood(job: AttackedJob, args: argparse.Namespace) -> dict[str, Any]:
    """Make all attempts as fast as the driver judges them."""
    stranger = Stranger(job.address, attempts(job.key, args.seed + 1))
    stranger.attack(min(args.frames, 5000))  # what is allocated once is no growth
    warm, before = job.usage(), stranger.total
    seconds = stranger.attack(args.frames - before)
    after = job.settled(warm)
    return {
        "judged": dict(stranger.judged.most_common()),
        "unanswered": dict(stranger.unanswered),
        "seconds": seconds,
        "driver_cpu_ms_each": 1e3 * (after.cpu_s - warm.cpu_s) / max(1, stranger.total - before),
        "growth": difference(warm, after),
    }


def idle(job: AttackedJob) -> dict[str, Any]:
    """Leave connections idle up to the limit, open each anew that the driver closes, and let a real peer in."""
    before, strangers, opened, waited = job.usage(), [], 0, []
    most, until = before.descriptors, time.monotonic() + IDLE_S
    while time.monotonic() < until:
        strangers = [each for each in strangers if not _is_closed(each)]
        while len(strangers) < IDLE:
            strangers.append(socket.create_connection(job.address, timeout=30.0))
            opened += 1
        most = max(most, job.usage().descriptors)
        if len(waited) < 5:
            begin = time.monotonic()
            connect([job.address], job.key, timeout_s=60.0).close()
            waited.append(time.monotonic() - begin)
    for stranger in strangers:
        stranger.close()
    return {
        "opened": opened,
        "most_descriptors": most,
        "joined_after_s": waited,
        "growth": difference(before, job.settled(before)),
    }


def _is_closed(stranger: socket.socket) -> bool:
    stranger.setblocking(False)
    try:
        closed = stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        closed = True
    if closed:
        stranger.close()
    return closed


def against_a_job(args: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that need a job. Returns their figures, and under `problems` what must not be."""
    with attacked_job(DESCRIPTORS) as job:
        time.sleep(2.0)
        first, found = job.ask(), {}
        found["frames"] = flood(job, args)
        found["idle"] = idle(job)
        last, end = job.ask(), job.ask("end")
    results = end["results"]
    problems = [f"{count} times: {text}" for text, count in end["bare_errors"].items()]
    if last["membership"] != first["membership"]:
        problems.append(f"the membership was {first['membership']} and is {last['membership']}")
    if results[0] != results[1]:
        problems.append(f"the workers ended differently: {results}")
    for name in ("frames", "idle"):
        growth = found.get(name, {}).get("growth", {})
        problems += [
            f"{name}: {growth[each]} {each} are left" for each in ("threads", "descriptors") if growth.get(each, 0) > 0
        ]
    if unanswered := found.get("frames", {}).get("unanswered"):
        problems.append(f"not judged: {unanswered}")
    return {**found, "problems": problems, "steps": results[0]["steps"], "log_lines": end["log_lines"]}


def against_files(args: argparse.Namespace) -> dict[str, Findings]:
    found = attack_documents(args.documents, args.seed)
    for kind, findings in found.items():
        print(f"{kind}: {findings.summary()}", flush=True)
    return found


def main() -> int:
    options = parser(__doc__, repeat=1, results=Path(__file__).with_name("results"))
    options.add_argument("--frames", type=int, default=1_000_000, help="hostile connections (%(default)s)")
    options.add_argument("--documents", type=int, default=120_000, help="hostile files (%(default)s)")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run (all)")
    args = options.parse_args()
    if args.quick:
        args.frames, args.documents = 8000, 3000
    series, raw, problems = [], {}, []
    if "frames" in args.only:
        raw = against_a_job(args)
        problems += raw.pop("problems")
        frames = raw["frames"]
        growth = [raw[part]["growth"]["resident_mib"] for part in ("frames", "idle")]
        series += [
            Series("attempts judged a second", [sum(frames["judged"].values()) / frames["seconds"]], ""),
            Series("CPU of the driver for an attempt", [frames["driver_cpu_ms_each"]], "ms"),
            Series("growth of the driver's memory", growth, "MiB", target_max=GROWTH_MIB),
            Series("connecting among idle strangers", raw["idle"]["joined_after_s"], "s", target_max=10.0),
        ]
    if "documents" in args.only:
        found = against_files(args)
        raw["documents"] = {kind: findings.as_json() for kind, findings in found.items()}
        problems += [problem for findings in found.values() for problem in findings.problems()]
        growth = [findings.growth_mib for findings in found.values()]
        series.append(Series("growth of a reader's memory", growth, "MiB", target_max=GROWTH_MIB))
    name = "fuzz" if set(args.only) == set(PARTS) else "-".join(["fuzz", *args.only])
    report(name, args, *series, raw={**raw, "problems": problems})
    lines = ["passed" if not problems else "failed", *problems]
    print("\n".join(lines).encode(errors="backslashreplace").decode())
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

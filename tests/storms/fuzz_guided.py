"""Coverage-guided fuzzing of all that is decoded: frames, messages, key-values, and the files that are read.

    pip install atheris                                       # Linux on x86-64; nothing else needs it
    python -m tests.storms.fuzz_guided                          # two minutes for each target
    python -m tests.storms.fuzz_guided --seconds 3600 --only manifests models --seed 7

`fuzz.py` draws its inputs blindly; here libFuzzer sees which branches of the package an input has reached, and goes on
from those that have reached new ones. Messages and documents are mutated as structures most of the time, with checksums
that are right.

- `wire-frames`: bytes at both ends of a connection, in pieces, before and behind the handshake.
- `wire-messages`: bodies of frames with a right MAC. A message has to be the same when it is sent on.
- `key-values`: operations on the store of Gloo's rendezvous, compared with a plain dictionary.
- `manifests`, `checkpoints`, `models`: a dataset, a checkpoint and a saved model, opened as a user opens them.

It passes if every error was one of this package and short enough to read, no input took longer than five seconds, and
no thread, descriptor or much memory is left. The exit status is 1 otherwise; the inputs that showed a problem are in
the result, in hexadecimal digits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._harness import Series, parser, report

PROGRAM = Path(__file__).with_name("guided_target.py")
TARGETS = ("wire-frames", "wire-messages", "key-values", "manifests", "checkpoints", "models")
GROWTH_MIB = 64.0
START_S = 300.0
"""The most that a target may take beyond its seconds: to import and instrument the package, and to judge one input."""
_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")


def fuzz(target: str, seconds: float, seed: int) -> dict[str, Any]:
    """Fuzz one target in a process of its own. Returns its findings with what libFuzzer said of the coverage."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        with log.open("wb") as lines:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), target, str(seconds), str(seed), str(result)],
                stdout=lines,
                stderr=lines,
                env={**os.environ, "TMPDIR": folder},
            )
            try:
                status = process.wait(seconds + START_S)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                process.kill()
                process.wait()
        text = log.read_text(errors="replace")
        if not result.exists():
            last = "\n".join(text.splitlines()[-12:])
            return {"problems": [f"the process ended with the status {status} and no result: {last}"]}
        found: dict[str, Any] = json.loads(result.read_text())
    seen = _COVERAGE.findall(text)
    for name, first, last in zip(("edges", "features", "corpus"), seen[0], seen[-1], strict=True) if seen else ():
        found[f"{name}_first"], found[name] = int(first), int(last)
    if not found.get("edges"):
        found["problems"].append("libFuzzer has seen no branch: the package was not instrumented")
    return found


def main() -> int:
    options = parser(__doc__, repeat=1, results=Path(__file__).with_name("results"))
    options.add_argument("--seconds", type=float, default=120.0, help="for each target (%(default)s)")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", nargs="+", choices=TARGETS, default=TARGETS, help="targets (all)")
    args = options.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print(
            "fuzz_guided.py needs atheris, which has wheels for Linux on x86-64: pip install atheris", file=sys.stderr
        )
        return 2
    if args.quick:
        args.seconds = min(args.seconds, 5.0)
    raw, series, problems = {}, [], []
    for target in args.only:
        begin = time.monotonic()
        raw[target] = found = fuzz(target, args.seconds, args.seed)
        problems += [f"{target}: {each}" for each in found["problems"]]
        if "executions" in found:
            series += [
                Series(f"{target}: inputs", [found["executions"]], ""),
                Series(f"{target}: branches reached", [found.get("edges", 0)], ""),
                Series(f"{target}: growth of memory", [found["growth_mib"]], "MiB", target_max=GROWTH_MIB),
            ]
        print(f"{target}: {found.get('executions', 0):,} inputs in {time.monotonic() - begin:.0f} s", flush=True)
    report("fuzz-guided", args, *series, raw={**raw, "problems": problems})
    lines = ["passed" if not problems else "failed", *problems]
    print("\n".join(lines).encode(errors="backslashreplace").decode())
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

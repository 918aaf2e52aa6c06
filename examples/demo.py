"""An elastic training that loses a worker half-way and goes on: watch it, then read the proof.

Three workers in Spark's local mode train a classifier of handwritten digits. Half-way this program kills one of them
with SIGKILL. Every worker keeps a diary of the steps it applied and of the rows it used, from which the figures at the
end are taken.

    make demo        or        python examples/demo.py [--launcher local]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

WORKERS = 3
EPOCHS = 8
BATCH = 16
STEP_S = 0.04
"""Added to each step, for the weight of a larger model: this one would be trained before you could read along."""

ERRORS_ONLY = """\
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
rootLogger.level = error
rootLogger.appenderRef.console.ref = console
"""
"""For Spark, which otherwise greets with a page of warnings about this machine."""


def train(digits: tuple, diaries: str) -> float:
    """What runs in each worker. Returns: the accuracy on rows that were not trained on."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import spark_elastic.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in digits)
    images = images.float() / 16
    held_out = torch.arange(len(labels)) % 5 == 0
    dataset = TensorDataset(images[~held_out], labels[~held_out], torch.arange(int((~held_out).sum())))
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)

    def accuracy() -> float:
        with torch.no_grad():
            return (model(images[held_out]).argmax(dim=1) == labels[held_out]).float().mean().item()

    diary = (Path(diaries) / str(os.getpid())).open("w", buffering=1)

    def note(what: str, **more: object) -> None:
        entry = {"what": what, "at": time.time(), "rank": hvd.rank(), "size": hvd.size(), **more}
        diary.write(json.dumps(entry) + "\n")

    @hvd.elastic.run
    def loop(state: hvd.elastic.TorchState) -> None:
        while state.epoch < EPOCHS:
            for batch, (inputs, targets, rows) in enumerate(loader):
                note("tries", step=state.step + 1, epoch=state.epoch, rows=rows.tolist())
                time.sleep(STEP_S)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                sampler.record_batch(batch, BATCH)
                state.step += 1
                note("applied", step=state.step)
                state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch + 1:2} of {EPOCHS}: {hvd.size()} workers, accuracy {accuracy():6.1%}")
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    loop(state)
    return accuracy()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--launcher", choices=["spark", "local"], default="spark", help="local: without Spark")
    options = arguments.parse_args()
    say(f"{WORKERS} workers will train for {EPOCHS} epochs; half-way one of them is killed.")
    with tempfile.TemporaryDirectory(prefix="spark_elastic-demo-") as folder:
        diaries = Path(folder, "diaries")
        diaries.mkdir()
        job = start(str(diaries), options.launcher)
        killed = watch(job, diaries)
        accuracies = job.result(timeout=60)
        entries = read(diaries)
    return prove(entries, killed, accuracies)


def start(diaries: str, launcher: str):
    from sklearn.datasets import load_digits

    import spark_elastic

    args = (load_digits(return_X_y=True), diaries)
    settings = {"num_proc": WORKERS, "min_num_proc": 1, "max_num_proc": WORKERS, "stdout": RankZero(), "verbose": 0}
    if launcher == "local":
        from spark_elastic.driver.launcher import LocalLauncher

        say("Starting plain processes on this machine.")
        return spark_elastic.run_async(train, args=args, launcher=LocalLauncher(), **settings)
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    say(f"Starting Spark: local[{WORKERS}], all in one JVM on this machine.")
    logging = Path(diaries).parent / "log4j2.properties"
    logging.write_text(ERRORS_ONLY)
    builder = SparkSession.builder.master(f"local[{WORKERS}]").appName("spark_elastic demo")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging.as_uri()}",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    return spark_elastic.run_async(train, args=args, spark=spark, **settings)


def watch(job, diaries: Path) -> dict:
    """Tell what happens as it happens, and kill a worker when half of the steps are done. Returns: whom, and when."""
    shown, killed = 0, {}
    while not job.done():
        time.sleep(0.1)
        for record in job.timeline()[shown:]:
            shown += 1
            say(str(record))
        if not killed and (victim := half_way(read(diaries))):
            killed = {"pid": victim, "at": time.time()}
            os.kill(victim, signal.SIGKILL)
            say(f">>> kill -9 {victim}, the worker of rank 1")
    return killed


def half_way(entries: list[dict]) -> int | None:
    """The process of rank 1 in the full world, once it is in the middle epoch."""
    for entry in reversed(entries):
        if entry["what"] == "tries" and entry["size"] == WORKERS and entry["rank"] == 1:
            return entry["pid"] if entry["epoch"] == EPOCHS // 2 and len(entry["rows"]) == BATCH else None
    return None


def prove(entries: list[dict], killed: dict, accuracies: list[float]) -> int:
    if not killed:
        say("The training was over before a worker could be killed.")
        return 1
    applied = [entry for entry in entries if entry["what"] == "applied"]
    last = max(entry["step"] for entry in applied if entry["size"] == WORKERS and entry["at"] < killed["at"] + 0.02)
    after = min((e for e in applied if e["step"] > last), key=lambda entry: entry["at"])
    twice = [key for key, times in Counter((e["pid"], e["step"]) for e in applied).items() if times > 1]
    steps = {entry["step"] for entry in applied}
    lost = sorted(set(range(1, max(steps) + 1)) - steps)
    rows = rows_by_epoch(entries)
    wanted = max(map(len, rows.values()))
    uneven = [epoch for epoch, used in rows.items() if len(used) != wanted or set(used.values()) != {1}]
    print()
    print(f"  killed                  at step {last} of {max(steps)}")
    print(f"  next step               {after['at'] - killed['at']:.2f} s after the kill, by {after['size']} workers")
    again = [e for e in applied if e["at"] > after["at"] and e["size"] == WORKERS]
    if again:
        pause = again[0]["at"] - max(e["at"] for e in applied if e["step"] == again[0]["step"] - 1)
        print(f"  back at {WORKERS} workers       {again[0]['at'] - killed['at']:.1f} s after the kill; ", end="")
        print(f"that step took {pause:.2f} s, others {usual_step(applied):.2f} s")
    else:
        print(f"  back at {WORKERS} workers       not before the training was over: this machine was too busy")
    print(f"  steps lost, done twice  {len(lost)}, {len(twice)}")
    print(f"  rows                    {wanted} in each of {len(rows)} epochs, each exactly once", end="")
    print(f", except in epochs {uneven}" if uneven else "")
    print(f"  accuracy                {accuracies[0]:.1%}, the same on all {len(accuracies)} workers")
    print()
    good = not lost and not twice and not uneven and len(set(accuracies)) == 1
    say("The training never noticed." if good else "That is not what should have happened.")
    return 0 if good else 1


def usual_step(applied: list[dict]) -> float:
    """The median time between two steps, in seconds."""
    times = [entry["at"] for entry in applied if entry["rank"] == 0]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def rows_by_epoch(entries: list[dict]) -> dict[int, Counter]:
    """How often each row went into a step that counts: the last try at the step, by the workers of one world."""
    tries = [entry for entry in entries if entry["what"] == "tries"]
    last_try = {entry["step"]: entry["size"] for entry in sorted(tries, key=lambda entry: entry["at"])}
    rows: dict[int, Counter] = {}
    for entry in tries:
        if entry["size"] == last_try[entry["step"]]:
            rows.setdefault(entry["epoch"], Counter()).update(entry["rows"])
    return rows


def read(diaries: Path) -> list[dict]:
    """All entries so far; a line that is being written, or was when its writer died, is left out."""
    entries = []
    for diary in diaries.iterdir():
        for line in diary.read_text().splitlines():
            try:
                entries.append({"pid": int(diary.name), **json.loads(line)})
            except ValueError:
                continue
    return sorted(entries, key=lambda entry: entry["at"])


class RankZero:
    """Shows the workers' lines without their prefix; only rank 0 prints any."""

    def write(self, text: str) -> int:
        say(text.partition(":")[2].rstrip())
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.2f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

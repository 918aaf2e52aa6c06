"""The job that `fuzz.py` attacks: a driver process of its own, with few descriptors, that answers questions.

    python fuzz_job.py END_FILE DESCRIPTORS

Prints its address and its key in one line of JSON. Each further line on stdin is answered by one of JSON with the state
of the job, `end` ends the job by making the file.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import spark_elastic
import spark_elastic.torch as hvd

WORKERS = 2
CHECK_EVERY = 50
"""Steps between two looks at the file that ends the training: each look is a collective."""


def train(end_file: str) -> dict[str, Any]:
    """Train until `end_file` exists. Returns the steps, and a checksum of the weights, which must be equal."""
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def loop(state: Any) -> int:
        while not ended(state.step, end_file):
            optimizer.zero_grad()
            model(torch.randn(64, 64)).square().mean().backward()
            optimizer.step()
            state.step += 1
        return int(state.step)

    steps = loop(state)
    return {"steps": steps, "weights": sum(float(each.detach().double().sum()) for each in model.parameters())}


def ended(step: int, end_file: str) -> bool:
    """Agree with the other workers on the end."""
    return step % CHECK_EVERY == 0 and bool(hvd.allreduce(torch.tensor(float(Path(end_file).exists()))) > 0)


class BareErrors(logging.Handler):
    """Counts log records that come with a traceback or from asyncio: errors that nothing of ours has met."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.levelno >= logging.WARNING
        if record.exc_info or record.name == "asyncio":
            self.counts[f"{record.getMessage().splitlines()[0]}: {record.exc_info and record.exc_info[1]!r}"] += 1


def state_of(job: spark_elastic.ElasticJob, errors: BareErrors) -> dict[str, Any]:
    """Return what the attack must not change (`membership`), and what the driver has logged."""
    status = job.status()
    membership = {
        "phase": status.phase,
        "round": status.round,
        "size": status.size,
        "failed": status.failed,
        "resets": status.resets,
        "workers": sorted((each.worker, each.host, each.rank) for each in job._driver.workers()),
        "changes": len(job.changes()),
        "agents": len(job._driver._peers.agents),
    }
    return {"membership": membership, "bare_errors": dict(errors.counts), "log_lines": errors.lines}


def main() -> None:
    end_file, descriptors = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    errors = BareErrors()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger().addHandler(errors)
    job = spark_elastic.run_async(
        train,
        (end_file,),
        num_proc=WORKERS,
        min_num_proc=WORKERS,
        launcher=spark_elastic.LocalLauncher(preimport=("torch",)),
        start_timeout=120,
        verbose=0,
    )
    while not job.status().progress:
        if job.done():
            job.result()
        time.sleep(0.1)
    spec = job._driver._peers.spec
    print(json.dumps({"address": spec.driver_addresses[0], "key": spec.key.hex()}), flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        print(json.dumps(state_of(job, errors)), flush=True)
    Path(end_file).touch()
    print(json.dumps({"results": job.result(timeout=60), **state_of(job, errors)}), flush=True)


if __name__ == "__main__":
    main()

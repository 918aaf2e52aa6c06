"""Jobs with `encrypt=True`: they train and recover as others do, and nobody on the way reads what workers print."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import spark_elastic
from spark_elastic import LocalLauncher
from spark_elastic.errors import MissingExtraError
from tests.integration import network
from tests.integration.processes import wait_until

LINE = "the-password-of-the-database"


def train(folder: str) -> float:
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)

    @hvd.elastic.run
    def loop(state) -> float:
        while True:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            print(LINE, flush=True)
            Path(folder, f"pid.{os.getpid()}").touch()
            time.sleep(0.02)
            if hvd.allreduce(torch.tensor(float(Path(folder, "end").exists()))) > 0:
                return float(model.weight.sum())
            state.commit()

    return loop(state)


def told(folder: Path, device: str, **settings: object) -> network.Eavesdropper:
    """Train with two workers, kill one, and go on with its successor. Returns who has listened meanwhile."""
    pids = lambda: [int(each.name[4:]) for each in folder.glob("pid.*")]  # noqa: E731
    with network.Eavesdropper(device, LINE.encode()) as ear:
        job = spark_elastic.run_async(
            train, (str(folder),), num_proc=2, min_num_proc=1, launcher=LocalLauncher(), verbose=0, **settings
        )
        wait_until(lambda: len(pids()) == 2, 60, "two workers train")
        os.kill(pids()[0], signal.SIGKILL)
        wait_until(lambda: len(pids()) == 3, 60, "its successor trains")
        (folder / "end").touch()
        first, second = job.result(60)
        assert first == second
    return ear


@pytest.mark.nightly
@pytest.mark.skipif(network.why_unavailable() is not None, reason=str(network.why_unavailable()))
def test_what_workers_print_can_be_read_on_the_way_only_without_encryption(tmp_path: Path) -> None:
    for name in ("plain", "encrypted"):
        (tmp_path / name).mkdir()
    assert told(tmp_path / "plain", "lo").read > 10
    ear = told(tmp_path / "encrypted", "lo", encrypt=True)
    assert ear.packets > 100
    assert ear.read == 0


def test_missing_package_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MissingExtraError, match="encryption"):
        spark_elastic.run(print, num_proc=1, launcher=LocalLauncher(), encrypt=True)

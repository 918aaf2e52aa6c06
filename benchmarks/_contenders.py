"""How `peers.py` starts each contender, gives it one more place, and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import _peer_training
import cloudpickle
import pyspark.cloudpickle
from _peer_training import train_with_files, train_with_spark_elastic

import spark_elastic
from tests.integration.processes import children

HERE = Path(__file__).resolve().parent
for pickler in (cloudpickle, pyspark.cloudpickle):  # executors do not have this folder; PySpark has its own
    pickler.register_pickle_by_value(_peer_training)


class Contender:
    """One training at a time, of one system."""

    name = ""
    settings = ""
    """Settings that differ from the defaults, and how training resumes after a fault, in words."""
    shrinks = True
    """True if the remaining workers continue and a replacement joins later; False if all workers are restarted."""
    grows = True
    """Whether a place that is added in mid-training is used."""

    def launch(self, folder: Path, size: int) -> float:
        """Start a training of `size` workers that may grow to 2; returns when it was asked for."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises: if the training has ended by itself."""

    def add(self) -> None:
        """One more place for a worker."""

    def stop(self) -> None:
        raise NotImplementedError


class Programs(Contender):
    """A contender whose users start programs."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def start(self, folder: Path, *command: object, environment: dict[str, str] | None = None, talks: bool = False):
        env = {k: v for k, v in os.environ.items() if k not in ("SPARK_HOME", "PYSPARK_PYTHON")}
        env.update(PYTHONPATH=str(HERE), OMP_NUM_THREADS="1", **(environment or {}))
        with (folder / f"{len(self._running)}.log").open("w") as log:
            program = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                text=True,
                cwd=folder,
                env=env,
                start_new_session=True,
            )
        self._running.append(program)
        return program

    def stop(self) -> None:
        below = [pid for program in self._running for pid in children(program.pid)]
        for program in self._running:
            program.terminate()
        for program in self._running:
            try:
                program.wait(5.0)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._running.clear()


class SparkElastic(Contender):
    name = "spark_elastic"
    settings = "local-cluster, warm session, min_num_proc=1; the dead worker's place is used again after its rest"

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    def launch(self, folder: Path, size: int) -> float:
        at = time.monotonic()
        self._job = spark_elastic.run_async(
            train_with_spark_elastic, (str(folder),), num_proc=size, min_num_proc=1, spark=self._spark, verbose=0
        )
        return at

    def check(self) -> None:
        if self._job.done():
            self._job.result()
            raise RuntimeError("the job has ended")

    def stop(self) -> None:
        self._job.cancel()


class SparkElasticRestart(SparkElastic):
    name = "spark_elastic, restart"
    settings = 'the same session and loop as TorchDistributor, with restart="world", restart_interval=3 for a newcomer'
    shrinks = False

    def launch(self, folder: Path, size: int) -> float:
        at = time.monotonic()
        settings: dict[str, Any] = {"num_proc": size, "min_num_proc": 1, "max_num_proc": 2, "restart_interval": 3}
        self._job = spark_elastic.run_async(
            train_with_files, (str(folder),), restart="world", spark=self._spark, verbose=0, **settings
        )
        return at

    def add(self) -> None:
        """The second slot is there from the start, and its worker waits."""


class TorchDistributor(Contender):
    name = "TorchDistributor"
    settings = "the same Spark session; a failed call is made again at once; checkpoint every 50 steps"
    shrinks = grows = False

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    def launch(self, folder: Path, size: int) -> float:
        self._stopped = False
        self._failures: list[Exception] = []
        self._folder = folder
        self._calls = threading.Thread(target=self._call_until_stopped, args=(size,), daemon=True)
        at = time.monotonic()
        self._calls.start()
        return at

    def _call_until_stopped(self, size: int) -> None:
        from pyspark.ml.torch.distributor import TorchDistributor as Distributor

        while not self._stopped:
            try:
                Distributor(num_processes=size, local_mode=False, use_gpu=False).run(
                    train_with_files, str(self._folder)
                )
            except Exception as error:  # what its user would see
                self._failures.append(error)

    def check(self) -> None:
        if len(self._failures) > 2:
            raise self._failures[-1]

    def stop(self) -> None:
        self._stopped = True
        while self._calls.is_alive():
            for path in self._folder.glob("*.steps"):
                try:
                    os.kill(int(path.stem), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self._calls.join(0.5)


class Torchrun(Programs):
    name = "torchrun"
    settings = "--max-restarts=100, checkpoint every 50 steps; joins: two agents, --nnodes=1:2, last_call_timeout=1"
    shrinks = False

    def launch(self, folder: Path, size: int) -> float:
        self._folder = folder
        at = time.monotonic()
        if size == 2:
            self._agent("--standalone", "--nnodes=1", "--nproc-per-node=2")
        else:
            self._port = free_port()
            self.add()
        return at

    def add(self) -> None:
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=peers"]
        self._agent("--nnodes=1:2", "--nproc-per-node=1", *rendezvous, "--rdzv-conf=last_call_timeout=1")

    def _agent(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=100", *arguments]
        # Sharing the store, the default, leaves a second agent without the address of the first: PyTorch 2.13.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.start(self._folder, *command, HERE / "peer_torchrun.py", self._folder, environment=environment)


class Horovod(Programs):
    name = "Horovod Elastic"
    settings = (
        "horovodrun --host-discovery-script, commit every 10 steps; it bars the host of the dead worker, and gets "
        "another one right after"
    )

    def __init__(self, python: str) -> None:
        super().__init__()
        self._python = python

    def launch(self, folder: Path, size: int) -> float:
        self._hosts = folder / "hosts"
        self._hosts.write_text("".join(f"{host}:1\n" for host in ("localhost", "127.0.0.1")[:size]))
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self._hosts}\n")
        script.chmod(0o755)
        options = ["-np", size, "--min-np", 1, "--max-np", 2, "--host-discovery-script", script]
        at = time.monotonic()
        runner = Path(self._python).with_name("horovodrun")
        self.start(folder, runner, *options, self._python, HERE / "peer_horovod_elastic.py", folder)
        return at

    def add(self) -> None:
        with self._hosts.open("a") as hosts:
            hosts.write(f"{socket.gethostname()}:1\n")


class RayTrain(Programs):
    name = "Ray Train"
    settings = (
        "TorchTrainer, num_workers=(1, 2), warm cluster, RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.1 (default 2), "
        "elastic_resize_monitor_interval_s=1 (default 60), checkpoint every 50 steps"
    )
    shrinks = False

    def __init__(self, python: str) -> None:
        super().__init__()
        self._python = python

    def launch(self, folder: Path, size: int) -> float:
        self._program = self.start(folder, self._python, HERE / "peer_ray_train.py", folder, size, talks=True)
        assert self._program.stdout is not None
        if not any(line.strip() == "ready" for line in self._program.stdout):
            raise RuntimeError(f"Ray did not start: {(folder / '0.log').read_text()[-2000:]}")
        at = time.monotonic()
        self._say("go")
        return at

    def add(self) -> None:
        self._say("add")

    def stop(self) -> None:
        assert self._program.stdin is not None
        below = children(self._program.pid)
        self._program.stdin.close()
        try:
            self._program.wait(20.0)
        except subprocess.TimeoutExpired:
            pass
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        super().stop()

    def _say(self, word: str) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(word + "\n")
        self._program.stdin.flush()


class Torchft(Programs):
    name = "torchft"
    settings = (
        "a replica group of one process each, every one under a torchrun with --max-restarts=100; lighthouse with "
        "--min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 1000 --heartbeat_timeout_ms 1000 (default 5000)"
    )

    def __init__(self, python: str) -> None:
        super().__init__()
        self._python = python

    def launch(self, folder: Path, size: int) -> float:
        self._folder = folder
        port = free_port()
        lighthouse = Path(self._python).with_name("torchft_lighthouse")
        options = ["--min_replicas", 1, "--quorum_tick_ms", 100, "--join_timeout_ms", 1000]
        self.start(folder, lighthouse, *options, "--heartbeat_timeout_ms", 1000, "--bind", f"[::]:{port}")
        self._environment = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
        at = time.monotonic()
        for _ in range(size):
            self._group()
        return at

    def _group(self) -> None:
        name = f"group-{len(self._running)}"
        command = [self._python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1"]
        command += ["--max-restarts=100", f"--master-port={free_port()}", str(HERE / "peer_torchft.py")]
        self.start(self._folder, *command, self._folder, name, environment=self._environment)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

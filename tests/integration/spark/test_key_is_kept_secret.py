"""The job's key, with which one can join a job, is in no place that others can read or that is kept."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pickle
import signal
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import spark_elastic
from spark_elastic.errors import UserFunctionError
from tests.integration import clusters
from tests.integration.processes import wait_until

LARGE = 3 << 20
"""Bytes of an argument: Spark sends functions of more than 1 MiB in another way, through a file of the driver."""
MOST_BYTES = 256 << 20


def train(folder: str, ballast: bytes) -> int:
    import spark_elastic.torch as hvd

    logging.basicConfig(level=logging.DEBUG)
    hvd.init()
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def loop(state) -> int:
        while True:
            state.step += 1
            Path(folder, f"pid.{os.getpid()}").write_text(f"{hvd.size()} {state.step} {len(ballast)}")
            print("working", flush=True)
            time.sleep(0.05)
            ended = hvd.allgather_object(Path(folder, "end").exists())
            if any(ended):
                if Path(folder, "raise").exists():
                    raise ValueError(f"of a world of {hvd.size()}")
                return state.step
            state.commit()

    return loop(state)


def needles(key: bytes) -> list[bytes]:
    """Return the key as it would be written."""
    return [
        key,
        key.hex().encode(),
        base64.b64encode(key).rstrip(b"="),
        repr(key)[2:-1].encode(),
        str(list(key)).encode(),
    ]


def files_with(found: list[bytes], folders: list[Path], since: float) -> list[str]:
    """Return the files below these folders, written since then, in which one of the texts is."""
    hits = []
    for folder in folders:
        for within, _, names in os.walk(folder):  # others work there too: what has gone meanwhile is left out
            for path in (Path(within, name) for name in names):
                with contextlib.suppress(OSError):
                    stat = path.lstat()
                    if (
                        path.is_file()
                        and not path.is_symlink()
                        and since <= stat.st_mtime
                        and stat.st_size < MOST_BYTES
                    ):
                        data = path.read_bytes()
                        hits += [str(path)] if any(one in data for one in found) else []
    return hits


def processes_with(found: list[bytes]) -> list[str]:
    """Return the processes of this machine that show one of the texts in their arguments or environment."""
    hits = []
    for folder in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                data = (folder / name).read_bytes()
                hits += [f"{folder}/{name}"] if any(one in data for one in found) else []
    return hits


def read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as answer:
        data: bytes = answer.read()
    return data


def pages_with(found: list[bytes], address: str) -> list[str]:
    """Return the pages of Spark's UI in which one of the texts is."""
    hits, seen = [], 0
    for page in ("jobs/", "stages/", "storage/", "environment/", "executors/", "api/v1/applications"):
        data = read(f"{address}/{page}")
        seen += len(data)
        hits += [page] if any(one in data for one in found) else []
    assert seen > 10_000
    return hits


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """Everything that this process logs, at every level."""
    path = tmp_path / "driver.log"
    handler = logging.FileHandler(path)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield path
    root.setLevel(level)
    root.removeHandler(handler)
    handler.close()


@pytest.mark.nightly
def test_key_is_in_no_argument_environment_log_file_or_page(tmp_path: Path, log_file: Path) -> None:
    since = time.time() - 1.0
    local, events = tmp_path / "local", tmp_path / "events"
    local.mkdir()
    events.mkdir()
    settings = {"spark_ui_enabled": "true", "spark_ui_port": "0", "spark_local_dir": str(local)}
    settings |= {"spark_eventLog_enabled": "true", "spark_eventLog_dir": f"file:{events}"}
    with clusters.standalone(workers=2, cores=1, **settings) as cluster:
        cluster.sc.setLogLevel("DEBUG")
        pids = lambda: [int(each.name[4:]) for each in tmp_path.glob("pid.*")]  # noqa: E731
        job = spark_elastic.run_async(
            train,
            (str(tmp_path), bytes(LARGE)),
            num_proc=2,
            min_num_proc=1,
            spark=cluster.spark,
            output_dir=str(tmp_path / "output"),
            status_port=0,
            verbose=2,
        )
        key = job._driver._peers.spec.key
        wait_until(lambda: len(pids()) == 2, 90, "two workers work")
        os.kill(pids()[0], signal.SIGKILL)
        wait_until(lambda: len(pids()) == 3, 90, "the dead worker's successor works")
        newest = max(tmp_path.glob("pid.*"), key=lambda each: each.stat().st_ctime_ns)
        os.kill(int(newest.name[4:]), signal.SIGSEGV)  # its last words are a crash report
        wait_until(lambda: len(pids()) == 4, 90, "the crashed worker's successor works")
        texts = needles(key)
        folders = [tmp_path, cluster._directory, Path("/dev/shm"), Path("/tmp")]
        assert processes_with(texts) == []
        assert files_with(texts, folders, since) == []
        assert pages_with(texts, cluster.sc.uiWebUrl) == []
        assert job.status_url is not None
        for page in ("", "status.json", "metrics"):
            assert not any(one in read(job.status_url.replace("/?", f"/{page}?")) for one in texts), page
        shown = [job, job.status(), job.changes(), job.timeline(), job._driver._peers.spec, job._driver._peers]
        assert not any(one in repr(shown).encode() for one in texts)
        (tmp_path / "end").touch()
        job.result(60)
        assert files_with(texts, folders, since) == []
    assert log_file.stat().st_size > 0
    printed = b"".join(path.read_bytes() for path in (tmp_path / "output").rglob("*") if path.is_file())
    assert b"Fatal Python error: Segmentation fault" in printed
    assert b"INFO:spark_elastic" in printed
    assert any(events.iterdir())
    assert files_with(texts, [tmp_path], since) == []
    for number, text in enumerate(texts):  # the search finds what is there
        (tmp_path / f"planted.{number}").write_bytes(b"key=" + text + b";")
    assert len(files_with(texts, [tmp_path], since)) == len(texts)


def test_key_is_in_nothing_that_a_failed_job_of_local_processes_leaves(tmp_path: Path, log_file: Path) -> None:
    since = time.time() - 1.0
    job = spark_elastic.run_async(
        train,
        (str(tmp_path), bytes(LARGE)),
        num_proc=2,
        launcher=spark_elastic.LocalLauncher(preimport=("torch",)),
        output_dir=str(tmp_path / "output"),
        verbose=2,
    )
    texts = needles(job._driver._peers.spec.key)
    wait_until(lambda: len([*tmp_path.glob("pid.*")]) == 2, 90, "two workers work")
    folders = [tmp_path, Path("/dev/shm"), Path("/tmp"), Path(tempfile.gettempdir())]
    assert processes_with(texts) == []
    assert files_with(texts, folders, since) == []
    (tmp_path / "raise").touch()
    (tmp_path / "end").touch()
    with pytest.raises(UserFunctionError, match="of a world of 2") as caught:
        job.result(60)
    error = caught.value
    assert error.__traceback__ is not None
    error = error.with_traceback(error.__traceback__.tb_next)  # without this frame, which holds the key
    said = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    assert "self = <" in said
    left = [said.encode(), pickle.dumps(error), repr([job, job.status(), job.timeline()]).encode()]
    assert not any(one in each for each in left for one in texts)
    assert files_with(texts, folders, since) == []
    assert b"the job failed" in log_file.read_bytes()

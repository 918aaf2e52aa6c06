"""The status page of real jobs: in a browser, and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from spark_elastic.driver.status_server import StatusServer, listen_for_pages
from spark_elastic.errors import UserFunctionError
from spark_elastic.membership import events as seen
from spark_elastic.membership.topology import StateVersion
from spark_elastic.reporting.event_log import MembershipChange
from spark_elastic.reporting.job_status import JobStatus, StatusModel, WorkerStatus
from spark_elastic.settings import ElasticSettings
from spark_elastic.wire.messages import EpochEnded
from tests.integration.browser import chromium, errors
from tests.integration.local import loops
from tests.integration.processes import wait_for_file, wait_until
from tests.unit.ml.torch import trainings

HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
LIMIT_S = 60


@pytest.fixture(scope="module")
def started_browser():
    with chromium() as made:
        yield made


@pytest.fixture
def browser(started_browser):
    started_browser.get("about:blank")  # leaves the last test's page, which may still ask for its job
    started_browser.get_log("browser")
    return started_browser


def counting(folder: str, until: int) -> int:
    """Count steps; every 20 steps are an epoch. Fails once there is a file "fail"."""
    from spark_elastic.wire import worker_link
    from spark_elastic.wire.messages import EpochEnded, LiveProgress, Notice

    def report(rank: int, step: int) -> None:
        link = worker_link.current()
        if rank == 0 and step % 5 == 0:
            link.show(LiveProgress(step // 20, 1000, "train", step % 20 * 10, 200, {"loss": 1 / (1 + step)}))
        if rank == 0 and step % 20 == 19:
            values = {"loss": 1 / (1 + step), "val_loss": 1.1 / (1 + step), HOSTILE: 0.5}
            link.show(EpochEnded(step // 20, 1000, 0.4, values))
        if rank == 0 and step == 10:
            link.show(Notice(f"notice {HOSTILE}"))
        if Path(folder, "fail").exists():
            raise ValueError(HOSTILE)

    return loops.steps(folder, until, report)


def fetched(url: str) -> Any:
    with urllib.request.urlopen(url.replace("?", "status.json?", 1), timeout=40) as answer:
        return json.load(answer)


def text(browser: Any, identity: str) -> str:
    return str(browser.execute_script("return document.getElementById(arguments[0]).innerText", identity))


def phase_is(browser: Any, wanted: str) -> None:
    wait_until(lambda: text(browser, "phase") == wanted, LIMIT_S, f"the page to say {wanted}")


def assert_harmless(browser: Any) -> None:
    assert browser.execute_script("return window.hacked") is None
    assert browser.execute_script("return [document.scripts.length, document.images.length]") == [1, 0]
    assert errors(browser) == []


@pytest.mark.nightly
def test_page_shows_the_loss_of_a_worker_the_wait_and_the_failure(start_job, tmp_path, browser):
    folder = str(tmp_path)
    job = start_job(counting, (folder, 10**6), min_num_proc=2, cooldown_range=(4.0, 4.0), status_port=0, verbose=0)
    browser.get(job.status_url)
    phase_is(browser, "running")
    wait_until(lambda: "val" in text(browser, "curves") or "loss" in text(browser, "curves"), LIMIT_S, "a curve")
    assert re.search(r"workers\s+2 of 2", text(browser, "tiles"))
    assert "rank 1" in text(browser, "hosts")
    wait_for_file(tmp_path, "step-30", LIMIT_S, "thirty steps")

    os.kill(int(Path(folder, "pid-1-1").read_text()), signal.SIGKILL)
    phase_is(browser, "waiting")
    assert "1 of at least 2 workers ready" in text(browser, "banner")
    assert re.search(r"so far, \d+ s left", text(browser, "banner"))
    assert re.search(r"lost\s+rank 1 on 127.0.0.1 lost \(killed by signal 9\)", text(browser, "events"))
    assert re.search(r"workers lost\s+1\b", text(browser, "tiles"))
    phase_is(browser, "running")
    assert browser.execute_script("return document.querySelectorAll('#world circle.lost').length") == 1
    wait_until(lambda: "joined" in text(browser, "events"), LIMIT_S, "the newcomer on the page")

    assert HOSTILE in text(browser, "curves")
    assert HOSTILE in text(browser, "events")
    Path(folder, "fail").touch()
    with pytest.raises(UserFunctionError):
        job.result(LIMIT_S)
    phase_is(browser, "failed")
    assert HOSTILE in text(browser, "banner")
    assert "no longer changes" in text(browser, "footer")
    assert_harmless(browser)


def served(document: Any) -> StatusServer:
    server = StatusServer(listen_for_pages("127.0.0.1", 0), "127.0.0.1", "a-token-of-16-letters", document)
    server.start()
    return server


def huge(now: float) -> Any:
    model = StatusModel("1-1", ElasticSettings(1000, 800, 1000), now - 900)
    for number in range(10_000):
        values = {"loss": 5 / (1 + number) + number % 7 / 50, "val_loss": 5.5 / (1 + number), "accuracy": 0.5}
        model.epoch(EpochEnded(number, 12_000, 1.5, values))
    workers = [
        WorkerStatus(
            number, f"ip-10-0-{number // 4}-17.eu-central-1.compute.internal", f"{number}", number, "training", None
        )
        for number in range(1000)
    ]
    for each in workers:
        model.observe(seen.WorkerAlive(each.worker, StateVersion(1, 5)), now)
    lost = [MembershipChange(time.time() - 800 + n, "lost", f"executor {n}", "x" * 300, 1000, 999) for n in range(700)]
    return model.document(JobStatus("running", 3, 1000, 10, "", 1000, 0, 700, 2), workers, lost, now, time.time())


@pytest.mark.nightly
def test_page_says_that_the_driver_is_gone(browser):
    document = huge(time.monotonic())
    server = served(lambda: document)
    browser.get(server.url)
    phase_is(browser, "running")
    server.close()
    phase_is(browser, "driver gone")
    assert "last state from" in text(browser, "banner")
    assert "10.0k of 12.0k" in text(browser, "tiles")


def test_epochs_of_a_silent_training_are_on_its_page(start_job, tmp_path):
    trainings.make_set(tmp_path / "set")
    training = trainings.make_training(tmp_path / "set", tmp_path)
    assert training.verbose == 0
    job = start_job(trainings.outcome, (training,), num_proc=1, verbose=0, status_port=0, preimport=("torch",))
    last: list[Any] = []
    url = job.status_url

    def follow() -> None:
        while not last or last[-1]["ended"] is None:
            last.append(fetched(url.replace("?", "?wait=30&", 1)))

    follower = threading.Thread(target=follow)
    follower.start()
    job.result(LIMIT_S)
    follower.join(LIMIT_S)
    assert last[-1]["phase"] == "finished"
    assert [row["epoch"] for row in last[-1]["epochs"]["rows"]] == list(range(training.epochs))
    assert last[-1]["epochs"]["rows"][-1]["values"]["loss"] > 0
    assert last[-1]["progress"]["epochs"] == training.epochs

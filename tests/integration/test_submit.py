"""examples/submit: the commands of its README that can be run on one machine."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.clusters import Standalone
from tests.integration.processes import wait_until

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "submit"
SUBMIT = shutil.which("spark-submit", path=os.path.dirname(sys.executable)) or "spark-submit"


def commands(heading):
    """The words of the first shell block under a heading of the README."""
    part = (FOLDER / "README.md").read_text().partition(f"\n## {heading}\n")[2]
    return shlex.split(re.search(r"```sh\n(.*?)```", part, re.DOTALL).group(1).replace("\\\n", " "))


class Submitted:
    """A spark-submit that runs, and what it has said so far."""

    def __init__(self, words, cwd):
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": paths}
        self._process = subprocess.Popen(
            words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines = []
        self._unread = 0
        self._reader = threading.Thread(target=lambda: self.lines.extend(self._process.stdout), daemon=True)
        self._reader.start()

    def says(self, pattern, timeout_s=180.0):
        """Wait for a line, among those after the line that the last call has waited for."""

        def found():
            assert self._process.poll() is None, "it has ended"
            matching = [i for i, line in enumerate(self.lines) if i >= self._unread and re.search(pattern, line)]
            self._unread = matching[0] + 1 if matching else self._unread
            return matching

        try:
            wait_until(found, timeout_s, f"it says {pattern!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{''.join(self.lines)}") from None

    def result(self, timeout_s=180.0):
        code = self._process.wait(timeout_s)
        self._reader.join(5.0)
        text = "".join(self.lines)
        assert code == 0, text
        return text

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # a shell, a JVM, and the script as a child of that
            self._process.wait()
        self._process.stdout.close()


def accuracy(text):
    return float(re.search(r"accuracy on \d+ digits that it has not seen: ([\d.]+)", text).group(1))


def test_the_command_for_this_machine_trains_and_saves(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with Submitted([SUBMIT, *commands("This machine")[1:]], tmp_path) as job:
        assert accuracy(job.result()) > 0.9
    assert (tmp_path / "digits-model" / "metadata").is_dir()


@pytest.mark.cluster
def test_a_job_grows_onto_a_worker_that_is_added_and_leaves_one_that_is_drained(tmp_path):
    """Standalone, with the dynamic allocation and the decommissioning that the README says."""
    elastic = commands("Executors that come and go")
    assert "spark.dynamicAllocation.shuffleTracking.enabled=true" in elastic
    settings = dict(word.split("=", 1) for word in elastic if "=" in word)
    with Standalone(2, 1, settings, wait_for=0, decommission=True) as cluster:
        words = [SUBMIT, "--master", cluster.master_url, *elastic]
        words += ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"]
        words += ["--executor-memory", "600m", "--executor-cores", "1", str(FOLDER / "train.py")]
        words += ["--num-proc", "2", "--min-num-proc", "1", "--max-num-proc", "3", "--epochs", "100000"]
        words += ["--store", "store", "--output", str(tmp_path / "model"), "--stop-file", str(tmp_path / "stop")]
        with Submitted(words, tmp_path) as job:
            job.says("(starts with|->) 2 workers")
            cluster.add_worker()
            job.says("-> 3 workers")
            cluster.decommission(cluster.worker_hosts()[0])
            job.says("drained.*-> 2 workers")
            (tmp_path / "stop").touch()
            text = job.result()
    assert " lost (" not in text  # drained: nothing was cut off
    assert accuracy(text) > 0.9
    assert (tmp_path / "model" / "metadata").is_dir()

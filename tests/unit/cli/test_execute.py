import contextlib

import pytest

from spark_elastic.cli import execute
from spark_elastic.cli.options import parser
from spark_elastic.driver.launcher import LocalLauncher
from spark_elastic.errors import JobCancelledError, NotEnoughSlotsError, RunTakenError, UserFunctionError


class FakeRun:
    """A fake `spark_elastic.run` that records its calls and raises `error`, if given."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def __call__(self, fn, args=(), **settings):
        self.calls.append((fn, args, settings))
        if self.error is not None:
            raise self.error


class FakeSession:
    """A fake Spark session that records how it was opened and closed."""

    def __init__(self):
        self.opened = None
        self.closed = False

    @contextlib.contextmanager
    def __call__(self, name, master, conf, **more):
        self.opened = (name, master, conf, more)
        try:
            yield "the session"
        finally:
            self.closed = True


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('training')\n")
    return str(path)


def run_cli(*words, run, session=None):
    return execute(parser().parse(words), run=run, open_session=session or FakeSession())


def raised(error_type="ValueError", error="bad", exit_code=None):
    return UserFunctionError(
        rank=1, host="h", error_type=error_type, error=error, traceback="Traceback: ...", exit_code=exit_code
    )


def test_the_script_is_run_in_the_session_with_the_settings(script):
    run, session = FakeRun(), FakeSession()
    words = ["--master", "local[3]", "--conf", "spark.a=b", "-np", "2", "--max-np", "5", script, "--lr", "1"]
    assert run_cli(*words, run=run, session=session) == 0
    assert session.opened == ("train.py", "local[3]", [("spark.a", "b")], {"slots": 5, "quiet": True})
    assert session.closed
    [(sent, _, settings)] = run.calls
    assert (sent.path, sent.args) == (script, ("--lr", "1"))
    assert settings == {"num_proc": 2, "max_num_proc": 5, "verbose": 1, "spark": "the session"}


def test_the_local_launcher_needs_no_spark(script):
    run, session = FakeRun(), FakeSession()
    assert run_cli("--launcher", "local", "-np", "2", script, run=run, session=session) == 0
    assert session.opened is None
    [(_, _, settings)] = run.calls
    assert isinstance(settings["launcher"], LocalLauncher)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no_such.py"], "cannot read the script"),
        (["bad.py"], "is not a Python script"),
        (["python3", "train.py"], "without python3 before it"),
        (["--slots-per-host", "2", "train.py"], "--host-discovery-script"),
        (["--host-discovery-script", "nowhere.sh", "train.py"], "nowhere.sh does not exist"),
        (["--output-filename", "bad.py/out", "train.py"], "cannot write to --output-filename"),
    ],
)
def test_what_cannot_work_is_reported_before_spark_starts(script, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("def (:\n")
    run, session = FakeRun(), FakeSession()
    assert run_cli(*words, run=run, session=session) == 2
    assert says in capsys.readouterr().err
    assert (run.calls, session.opened) == ([], None)


def test_the_discovery_script_is_asked_with_the_slots_per_host(script, tmp_path):
    finder = tmp_path / "hosts.sh"
    finder.write_text("#!/bin/sh\necho a:4\necho b\n")
    finder.chmod(0o755)
    run = FakeRun()
    assert run_cli("--host-discovery-script", str(finder), "--slots-per-host", "2", script, run=run) == 0
    [(_, _, settings)] = run.calls
    assert settings["discovery"].find_available_hosts_and_slots() == {"a": 4, "b": 2}


@pytest.mark.parametrize(("exit_code", "code"), [(3, 3), (256, 1), (-1, 255)])
def test_script_that_exits_with_a_code_gives_the_command_that_code(script, capsys, exit_code, code):
    error = raised("ScriptExit", f"exited with code {exit_code}", exit_code=exit_code)
    assert run_cli(script, run=FakeRun(error)) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NotEnoughSlotsError(have=1, need=2, waited_s=60, setting="start_timeout"), "1 of 2 slots"),
        (RunTakenError("the run was taken over"), "the run was taken over"),
    ],
)
def test_a_job_that_cannot_go_on_says_why_without_a_traceback(script, capsys, error, says):
    assert run_cli(script, run=FakeRun(error)) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"spark-elastic: error: {says}")
    assert "Traceback" not in told


@pytest.mark.parametrize("error", [KeyboardInterrupt(), JobCancelledError("cancelled")])
def test_an_interrupted_job_exits_with_130_and_closes_the_session(script, error):
    session = FakeSession()
    assert run_cli(script, run=FakeRun(error), session=session) == 130
    assert session.closed


def test_output_of_ranks_is_written_to_the_folder_in_place_of_that_of_an_earlier_run(script, tmp_path):
    earlier = tmp_path / "out" / "rank.3" / "stdout"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("old\n")
    run = FakeRun()
    assert run_cli("--output-filename", str(tmp_path / "out"), script, run=run) == 0
    [(_, _, settings)] = run.calls
    assert settings["output_dir"] == tmp_path / "out"
    assert not earlier.exists()

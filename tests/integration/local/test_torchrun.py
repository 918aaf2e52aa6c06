"""Programs for torchrun, unchanged (`restart="world"`): what they are given, and what a loss does to them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spark_elastic.errors import NotEnoughSlotsError, RepeatedCrashError, UserFunctionError
from spark_elastic.membership.events import ExecutorDecommissioned
from spark_elastic.membership.timeline import WorldStarted
from tests.integration.processes import is_running, wait_until
from tests.integration.torchrun_programs import ddp

PROGRAMS = Path(ddp.__file__).parent
STEPS, WAIT_S = 20, 120
TORCH = ("torch",)


def lines(folder, word):
    """The lines of a program that begin with the word, each as (time, the other words)."""
    path = Path(folder, "lines")
    split = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(at), words) for at, _, first, *words in split if first == word]


def undisturbed():
    """The parameters after an undisturbed training in one process."""
    model, optimizer = ddp.parts()
    for step in range(STEPS):
        inputs, wanted = ddp.batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
    return model.state_dict()


def assert_trained_as_undisturbed(folder):
    torch.testing.assert_close(torch.load(Path(folder, "final.pt")), undisturbed(), rtol=1e-4, atol=1e-6)


def worlds(job):
    return [record for record in job.timeline() if isinstance(record, WorldStarted)]


def test_a_killed_program_resumes_from_its_own_checkpoint(start_job, tmp_path):
    args = (str(tmp_path), str(STEPS), "1:13")
    job = start_job(PROGRAMS / "ddp.py", args, restart="world", preimport=TORCH)
    assert job.result(WAIT_S) == [None, None]
    assert_trained_as_undisturbed(tmp_path)
    assert {words[-1] for _, words in lines(tmp_path, "trains")} == {"0", "10"}
    begun = [(words[1], words[3], words[5]) for _, words in lines(tmp_path, "begins")]
    assert sorted(begun) == [("0", "2", "0"), ("0", "2", "1"), ("1", "2", "0"), ("1", "2", "1")]
    assert len({words[-1] for _, words in lines(tmp_path, "begins")}) == 2, "each round has a port"
    [(died_at, _)] = lines(tmp_path, "dies")
    first = min(at for at, words in lines(tmp_path, "begins") if words[5] == "1")
    print(f"loss -> first line of the new program: {first - died_at:.2f} s")
    [lost] = [change for change in job.changes() if change.kind == "lost"]
    assert (lost.steps_lost, lost.restarts_world, lost.after) == (None, True, 1)
    assert "all workers started again" in str(lost)


def test_two_losses_are_two_restarts(start_job, tmp_path):
    args = (str(tmp_path), str(STEPS), "1:7", "0:13")
    job = start_job(PROGRAMS / "ddp.py", args, num_proc=3, min_num_proc=2, restart="world", preimport=TORCH)
    job.result(WAIT_S)
    assert_trained_as_undisturbed(tmp_path)
    assert [world.size for world in worlds(job)] == [3, 3, 3]


def test_a_program_with_fsdp2_resumes(start_job, tmp_path):
    job = start_job(PROGRAMS / "fsdp2.py", (str(tmp_path), str(STEPS), "12"), restart="world", preimport=TORCH)
    job.result(WAIT_S)
    assert_trained_as_undisturbed(tmp_path)
    assert {words[-1] for _, words in lines(tmp_path, "trains")} == {"0", "10"}


def test_an_exception_without_a_loss_is_the_users(start_job):
    def program():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("no such column: 'lable'")
        dist.barrier()

    job = start_job(program, restart="world", preimport=TORCH)
    with pytest.raises(UserFunctionError, match=r"rank 1 on 127\.0\.0\.1 raised ValueError: no such column: 'lable'"):
        job.result(WAIT_S)
    assert len(worlds(job)) == 1


def test_an_exception_before_a_loss_is_its_consequence(start_job, tmp_path):
    def program(folder):
        rank = int(os.environ["RANK"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            first = Path(folder, "pid")
            if rank == 0:
                first.write_text(str(os.getpid()))
                raise RuntimeError("Connection closed by peer")
            wait_until(lambda: first.exists() and first.read_text(), WAIT_S, "the first rank's pid")
            wait_until(lambda: not is_running(int(first.read_text())), WAIT_S, "the end of the first rank")
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    job = start_job(program, (str(tmp_path),), restart="world")
    assert job.result(WAIT_S) == [0, 1]
    assert [world.size for world in worlds(job)] == [2, 2]


def test_below_the_minimum_a_restart_waits_and_then_fails(start_job, tmp_path):
    job = start_job(sleeps, (str(tmp_path),), restart="world", elastic_timeout=10)
    wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == 2, WAIT_S, "both run")
    launcher = job._driver._launcher
    launcher.launch = lambda slot: None  # the cluster has no other place
    os.kill(launcher._processes[1].pid, signal.SIGKILL)
    with pytest.raises(NotEnoughSlotsError, match=r"1 of 2 slots were available after 10 s; .* raise elastic_timeout"):
        job.result(WAIT_S)


def sleeps(folder):
    """Sleep in the first world; at SIGTERM, save and leave. Return the size of a later world."""

    def save(*_):
        Path(folder, f"saved-{os.environ['RANK']}").touch()
        sys.exit(143)

    signal.signal(signal.SIGTERM, save)
    Path(folder, f"runs-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.pause()
    return int(os.environ["WORLD_SIZE"])


def test_a_decommission_sends_sigterm_to_all_so_that_they_can_save(start_job, tmp_path):
    job = start_job(sleeps, (str(tmp_path),), min_num_proc=1, restart="world")
    wait_until(lambda: len(list(tmp_path.glob("runs-*"))) == 2, WAIT_S, "both run")
    job._driver.post(ExecutorDecommissioned("local-1"))
    assert job.result(WAIT_S) == [1]
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert [change.kind for change in job.changes() if change.kind in ("lost", "drained")] == ["drained"]


def test_newcomers_are_taken_in_after_the_restart_interval(start_job, tmp_path):
    job = start_job(sleeps, (str(tmp_path),), num_proc=1, max_num_proc=2, restart="world", restart_interval=0.5)
    assert job.result(WAIT_S) == [2, 2]
    assert [world.size for world in worlds(job)] == [1, 2]


def test_torch_distributed_without_the_setting_names_it(start_job):
    def program():
        import torch.distributed as dist

        dist.init_process_group("gloo")

    with pytest.raises(UserFunctionError, match=r"RANK expected, but not set.*restart='world'.*--torchrun"):
        start_job(program, num_proc=1).result(WAIT_S)


def test_an_elastic_loop_is_refused_where_all_start_again(start_job):
    def program():
        import spark_elastic.torch as hvd

        hvd.init()
        hvd.elastic.run(lambda state: None)(hvd.elastic.ObjectState(step=0))

    with pytest.raises(UserFunctionError, match=r"UsageError: .* loop of hvd.elastic.run.*leave out one of the two"):
        start_job(program, num_proc=1, restart="world", preimport=TORCH).result(WAIT_S)


@pytest.mark.nightly
def test_the_command_runs_a_program_for_torchrun(tmp_path):
    command = [sys.executable, "-m", "spark_elastic", "--launcher", "local", "--torchrun", "-np", "2"]
    words = [str(PROGRAMS / "ddp.py"), str(tmp_path), str(STEPS), "0:12"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert_trained_as_undisturbed(tmp_path)


def test_a_group_that_is_destroyed_lives_until_the_program_ends_or_makes_another(start_job):
    """A DDP model whose group ends with it may wait forever."""
    job = start_job(PROGRAMS / "ends.py", ("groups",), restart="world", preimport=TORCH)
    assert job.result(WAIT_S) == [None, None]


def test_a_rank_that_waits_for_one_that_has_returned_fails(start_job):
    with pytest.raises(UserFunctionError, match="onnection"):
        start_job(PROGRAMS / "ends.py", ("uneven",), restart="world", preimport=TORCH).result(WAIT_S)


def test_a_program_ends_when_its_threads_and_child_processes_have(start_job, tmp_path):
    job = start_job(PROGRAMS / "ends.py", ("late", str(tmp_path)), restart="world", preimport=TORCH)
    assert job.result(WAIT_S) == [None, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child-0", "child-1", "thread-0", "thread-1"]


def test_exit_code_0_is_an_end(start_job):
    assert start_job(PROGRAMS / "ends.py", ("exit",), restart="world").result(WAIT_S) == [None, None]


def test_a_program_that_is_killed_in_each_world_fails(start_job):
    settings = {"restart": "world", "preimport": TORCH, "crash_limit": 2, "cooldown_range": (0.1, 0.5)}
    with pytest.raises(RepeatedCrashError, match="2 worlds"):
        start_job(PROGRAMS / "ends.py", ("killed",), **settings).result(WAIT_S)

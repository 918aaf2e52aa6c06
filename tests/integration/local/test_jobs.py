import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spark_elastic.errors import (
    JobCancelledError,
    NotEnoughSlotsError,
    StateLostError,
    UserFunctionError,
    WorkerStartError,
)
from spark_elastic.membership.timeline import WorkerLeft, WorldStarted
from tests.integration.local import loops
from tests.integration.processes import GONE_S, is_running, wait_until
from tests.nightly import by_night

WAIT_S = 30


def pid_of(folder, rank, round):
    path = Path(folder, f"pid-{rank}-{round}")
    wait_until(lambda: path.exists() and path.read_text(), WAIT_S, f"rank {rank} in round {round}")
    return int(path.read_text())


def worlds(job):
    return [record for record in job.timeline() if isinstance(record, WorldStarted)]


def wait_for_round(job, round, size):
    wait_until(
        lambda: any(w.round >= round and w.size == size for w in worlds(job)), WAIT_S, f"round {round} of {size}"
    )


@pytest.mark.nightly
def test_a_big_result_comes_whole(start_job):
    def big():
        loops.rank_and_size()
        return bytes(50_000_000)

    (result,) = start_job(big, num_proc=1).result(60)
    assert len(result) == 50_000_000


def test_survivors_go_on_from_the_last_step_when_a_worker_is_killed(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 150), num_proc=3, min_num_proc=2)
    victim = pid_of(tmp_path, 1, 1)
    wait_until(Path(tmp_path, "step-20").exists, WAIT_S, "step 20")
    os.kill(victim, signal.SIGKILL)
    assert job.result(60)[:2] == [150, 150]
    broken = worlds(job)[1]
    assert broken.size == 2
    assert broken.progress >= 20
    left = next(record for record in job.timeline() if isinstance(record, WorkerLeft))
    assert "silent" not in left.why  # it was seen at once, and no timeout was waited for


@pytest.mark.nightly
def test_a_killed_agent_takes_its_worker_along_and_is_replaced(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 2000), num_proc=2, min_num_proc=1)
    before = {pid_of(tmp_path, rank, 1) for rank in range(2)}
    slot, agent = next(iter(job._driver._launcher._processes.items()))
    os.kill(agent.pid, signal.SIGKILL)
    wait_for_round(job, 3, 2)
    assert job._driver._launcher._processes[slot].pid != agent.pid
    assert len(before & {pid_of(tmp_path, rank, 3) for rank in range(2)}) == 1, "the other one was not started again"
    lost = [change for change in job.changes() if change.kind == "lost"]
    assert [change.reason for change in lost] == ["its agent was killed by signal 9 (SIGKILL)"]


@pytest.mark.nightly
def test_results_arrive_after_all_agents_were_lost_at_once(start_job, tmp_path):
    def wait_for_a_file():
        import time

        rank_and_size = loops.rank_and_size()
        while not Path(tmp_path, "go").exists():
            time.sleep(0.05)
        return rank_and_size

    job = start_job(wait_for_a_file, num_proc=2)
    wait_for_round(job, 1, 2)
    for agent in list(job._driver._launcher._processes.values()):
        os.kill(agent.pid, signal.SIGKILL)
    wait_for_round(job, 2, 2)
    Path(tmp_path, "go").touch()
    assert job.result(60) == [(0, 2), (1, 2)]


def test_a_stopped_worker_is_removed_after_the_heartbeat_timeout(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 100_000), num_proc=2, min_num_proc=1, heartbeat_timeout=3.0)
    victim = pid_of(tmp_path, 1, 1)
    os.kill(victim, signal.SIGSTOP)
    wait_for_round(job, 2, 1)
    left = next(record for record in job.timeline() if isinstance(record, WorkerLeft))
    assert "silent" in left.why
    wait_until(lambda: not is_running(victim), WAIT_S, "the stopped worker is killed")


def test_all_workers_lost_at_once_is_a_clear_error(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 100_000), num_proc=2, min_num_proc=1)
    pids = [pid_of(tmp_path, rank, 1) for rank in range(2)]
    wait_until(Path(tmp_path, "step-5").exists, WAIT_S, "step 5")
    wait_until(lambda: (job.status().progress or 0) >= 1, WAIT_S, "progress reported")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(StateLostError, match="every worker that held the state is gone"):
        job.result(30)


def test_below_the_minimum_the_job_waits_and_then_says_what_it_had(start_job, tmp_path):
    def once(folder):
        marker = Path(folder, "rank-1-was-here")
        if marker.exists():  # the replacement never gets ready
            threading.Event().wait()
        return loops.steps(folder, 100_000)

    job = start_job(once, (str(tmp_path),), num_proc=2, elastic_timeout=1.5)
    victim = pid_of(tmp_path, 1, 1)
    Path(tmp_path, "rank-1-was-here").touch()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(NotEnoughSlotsError, match=r"1 of 2 slots were available after 2 s; .* raise elastic_timeout"):
        job.result(30)


def test_a_bug_in_the_function_fails_the_job_once_with_its_traceback(start_job):
    def buggy():
        rank, _ = loops.rank_and_size()
        if rank == 1:
            raise ValueError("no such column: 'lable'")
        threading.Event().wait()

    with pytest.raises(
        UserFunctionError, match=r"rank 1 on 127\.0\.0\.1 raised ValueError: no such column: 'lable'"
    ) as error:
        start_job(buggy).result(30)
    assert "in buggy" in error.value.traceback
    assert "spark_elastic/task" not in error.value.traceback


@pytest.mark.nightly
def test_leaving_by_sys_exit_is_not_finishing(start_job):
    def leaves():
        loops.rank_and_size()
        sys.exit(0)

    with pytest.raises(UserFunctionError, match="SystemExit: 0"):
        start_job(leaves).result(30)


@pytest.mark.nightly
def test_a_process_that_exits_with_0_is_not_a_success(start_job):
    def vanishes():
        os._exit(0)

    with pytest.raises(WorkerStartError, match="exited with code 0 before the function was finished"):
        start_job(vanishes).result(30)


def test_a_function_may_close_its_output(start_job, tmp_path):
    def quiet():
        loops.rank_and_size()
        sys.stdout.close()
        sys.stdout = None

    with open(tmp_path / "errors", "w") as errors:
        start_job(quiet, stderr=errors).result(30)
    assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are named on Linux")
def test_workers_alone_have_the_name_that_pages_kill(start_job):
    def names():
        found = subprocess.run(["ps", "-e", "-o", "pgid=,comm="], stdout=subprocess.PIPE, text=True, check=True).stdout
        lines = [line.split() for line in found.splitlines()]
        return sorted(name for group, name, *_ in lines if int(group) == os.getpgrp() and name != "ps")

    assert start_job(names, num_proc=1).result(30) == [["elastic-reaper", "elastic-worker"]]


def test_workers_that_cannot_start_fail_the_job_with_their_stderr(start_job):
    def crashes():
        print("libfoo.so: cannot open shared object file", file=sys.stderr)
        os._exit(127)

    with pytest.raises(WorkerStartError, match=r"libfoo.so: cannot open") as error:
        start_job(crashes).result(30)
    # the limit is three; the fourth process, on the other slot, may exit before the third one's stderr is reported
    assert error.value.attempts in (3, 4)


@pytest.mark.nightly
def test_a_forked_child_that_ends_in_the_function_ends_itself_alone(start_job):
    def forks():
        loops.rank_and_size()
        codes = []
        for how in ("exit", "error", "return"):
            child = os.fork()
            if child == 0:
                if how == "exit":
                    sys.exit(3)
                if how == "error":
                    raise ValueError("in the child")
                return "of the child"
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return codes

    assert start_job(forks).result(60) == [[3, 1, 0]] * 2


@pytest.mark.nightly
def test_a_result_that_cannot_be_pickled_says_so(start_job):
    def unpicklable():
        loops.rank_and_size()
        return threading.Lock()

    with pytest.raises(UserFunctionError, match="returned a lock that cannot be pickled"):
        start_job(unpicklable).result(30)


def test_cancel_ends_everything_within_seconds(start_job, tmp_path):
    job = start_job(loops.steps, (str(tmp_path), 100_000))
    pid_of(tmp_path, 0, 1)
    job.cancel("enough")
    assert job.done()
    with pytest.raises(JobCancelledError, match="enough"):
        job.result(0)


@pytest.mark.nightly
def test_two_jobs_at_once_do_not_disturb_each_other(start_job, tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    jobs = [start_job(loops.steps, (str(folder), 60), num_proc=2, min_num_proc=1) for folder in folders]
    os.kill(pid_of(folders[0], 1, 1), signal.SIGKILL)
    assert jobs[1].result(60) == [60, 60]
    assert jobs[0].result(60)[0] == 60
    assert len(worlds(jobs[1])) == 1


def test_output_arrives_line_by_line_with_its_rank(start_job, capsys):
    def talks():
        rank, _ = loops.rank_and_size()
        print(f"I am {rank}")
        print("x" * 100_000)
        print("no newline at the end", end="", file=sys.stderr)

    start_job(talks).result(30)
    captured = capsys.readouterr()
    assert "[1]<stdout>:I am 1\n" in captured.out
    assert sum(line.count("x") for line in captured.out.splitlines() if "I am" not in line) == 200_000
    assert "[0]<stderr>:no newline at the end\n" in captured.err


@pytest.mark.parametrize("name", by_night(["SIGKILL", "SIGTERM"], but=["SIGKILL"]))
def test_workers_are_gone_when_the_driver_process_is_killed(tmp_path, name):
    import subprocess

    code = f"""
import sys; sys.path.insert(0, {os.getcwd()!r})
from spark_elastic import LocalLauncher, run
from tests.integration.local import loops
run(loops.steps, ({str(tmp_path)!r}, 10**6), num_proc=2, launcher=LocalLauncher(preimport=()))
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    pids = [pid_of(tmp_path, rank, 1) for rank in range(2)]
    driver.send_signal(getattr(signal, name))
    driver.wait(WAIT_S)
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid), GONE_S, f"worker {pid} is gone")

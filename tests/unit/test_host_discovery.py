from __future__ import annotations

import logging
import time

import pytest

from spark_elastic.driver.hosts import FixedHosts, HostDiscoveryScript, HostManager, parse_hosts
from spark_elastic.errors import DiscoveryScriptError, InvalidSettingsError
from spark_elastic.membership.events import HostsObserved
from tests.leftovers import Before


def script(folder, body, *, executable=True, shebang="#!/bin/sh"):
    path = folder / "discover.sh"
    path.write_text(f"{shebang}\n{body}\n")
    path.chmod(0o755 if executable else 0o644)
    return str(path)


# --- parsing ------------------------------------------------------------------------------------


def test_lines_are_hosts_with_their_slots_in_their_order():
    assert parse_hosts(["b:2", "", "a", "  c-1.example.com:4  # rack 3", "# none"], 3) == {
        "b": 2,
        "a": 3,
        "c-1.example.com": 4,
    }


def test_ipv6_addresses_stand_in_brackets():
    assert parse_hosts(["[fd00::2]:2", "[fd00::3]"], 1) == {"fd00::2": 2, "fd00::3": 1}


@pytest.mark.parametrize("line", ["a b", "a:", "a:x", "a:1:2", "a:-1", "<html>"])
def test_line_that_is_no_host_is_quoted_with_its_number(line):
    with pytest.raises(ValueError, match=r"\(line 2\)"):
        parse_hosts(["ok", line], 1)


def test_host_without_slots_is_refused():
    with pytest.raises(ValueError, match="leave the host out instead"):
        parse_hosts(["a:0"], 1)


@pytest.mark.parametrize("hosts", ["", {}, "h1:x", {"h1": 0}, {"h1": "2"}])
def test_invalid_fixed_hosts_are_refused(hosts):
    with pytest.raises(InvalidSettingsError):
        FixedHosts(hosts)


# --- the script ---------------------------------------------------------------------------------


def test_script_answers_with_its_default_slots(tmp_path):
    discovery = HostDiscoveryScript(script(tmp_path, "echo h1; echo h2:4"), default_slots=2)
    assert discovery.find_available_hosts_and_slots() == {"h1": 2, "h2": 4}


def test_missing_script_is_refused_before_it_is_run(tmp_path):
    with pytest.raises(DiscoveryScriptError, match="does not exist"):
        HostDiscoveryScript(str(tmp_path / "none.sh"))


def test_script_that_is_not_executable_is_refused_with_the_command_that_helps(tmp_path):
    path = script(tmp_path, "echo h1", executable=False)
    with pytest.raises(DiscoveryScriptError, match=f"not executable; chmod \\+x {path}"):
        HostDiscoveryScript(path)


def test_script_without_an_interpreter_is_explained(tmp_path):
    discovery = HostDiscoveryScript(script(tmp_path, "echo h1", shebang="echo h0"))
    with pytest.raises(DiscoveryScriptError, match="#!/bin/sh"):
        discovery.find_available_hosts_and_slots()


def test_exit_code_is_reported_with_the_last_line_of_stderr(tmp_path):
    discovery = HostDiscoveryScript(script(tmp_path, "echo a >&2; echo no token >&2; exit 7"))
    with pytest.raises(DiscoveryScriptError, match="exited with 7: no token"):
        discovery.find_available_hosts_and_slots()


def test_script_that_hangs_is_killed_with_its_children(tmp_path):
    child = tmp_path / "child"
    hangs = script(tmp_path, f"sleep 600 & echo $! > {child}.part; mv {child}.part {child}; wait")
    for timeout_s in (0.3, 3, 30):  # on a busy machine the script may not have come that far
        discovery = HostDiscoveryScript(hangs, timeout_s=timeout_s)
        with pytest.raises(DiscoveryScriptError, match=f"longer than {timeout_s} s"):
            discovery.find_available_hosts_and_slots()
        if child.exists():
            break
    assert is_gone(int(child.read_text()))


def is_gone(pid, timeout_s=20.0):
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
    return False


# --- the manager --------------------------------------------------------------------------------


class Scripted:
    """A discovery that gives one answer after the other."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def find_available_hosts_and_slots(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def manager(discovery, seen):
    made = HostManager(discovery, str, interval_s=3600.0)
    made.start(seen.append)
    return made


def test_only_changes_are_reported_and_known_hosts_keep_their_order():
    seen: list[HostsObserved] = []
    hosts = manager(Scripted({"a": 1}, {"a": 1}, {"b": 1, "a": 1}, {"b": 1}), seen)
    assert [hosts.poll() for _ in range(3)] == [False, True, True]
    assert seen == [HostsObserved({"a": 1}), HostsObserved({"a": 1, "b": 1}), HostsObserved({"b": 1})]
    hosts.close()


def test_later_failures_are_logged_once_and_the_last_answer_remains_valid(caplog):
    seen: list[HostsObserved] = []
    down = DiscoveryScriptError("exited with 1")
    hosts = manager(Scripted({"a": 1}, down, down, {"a": 1}), seen)
    with caplog.at_level(logging.INFO, "spark_elastic"):
        assert [hosts.poll() for _ in range(3)] == [False] * 3
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "host discovery failed",
        "host discovery works again",
    ]
    assert seen == [HostsObserved({"a": 1})]
    hosts.close()


def test_close_ends_a_script_that_hangs_and_the_thread_that_waits_for_it(tmp_path):
    flag = tmp_path / "hang"
    pid = tmp_path / "pid"
    body = f"echo h1; if [ -e {flag} ]; then echo $$ > {pid}; exec sleep 600; fi"
    discovery, before = HostDiscoveryScript(script(tmp_path, body)), Before()
    hosts = HostManager(discovery, str, interval_s=0.01)
    hosts.start(lambda event: None)
    flag.touch()
    until = time.monotonic() + 60.0
    while not (pid.exists() and pid.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.01)
    hosts.close()
    assert is_gone(int(pid.read_text()))
    before.assert_no_threads_left()

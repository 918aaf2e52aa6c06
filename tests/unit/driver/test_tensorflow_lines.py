"""TensorFlow's messages about interrupted steps are left out, and nothing else."""

from __future__ import annotations

from spark_elastic.driver.tensorflow_lines import InterruptedSteps

FRAMES = [
    "Traceback (most recent call last):",
    "",
    '  File "/x/spark_elastic/tensorflow/host.py", line 172, in guarded',
    "    return function(*arrays)",
    "           ^^^^^^^^^^^^^^^^^",
    "",
    "spark_elastic.errors.HorovodInternalError: a collective failed: the process of rank 1 is gone",
    "",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    '  File "/x/script_ops.py", line 269, in __call__',
    "    ret = func(*args)",
    "",
    "spark_elastic.errors.HorovodInternalError: a collective failed: the process of rank 1 is gone [lost peer 1]",
    "",
    "",
]
FAILED = "UNKNOWN: HorovodInternalError: a collective failed: the process of rank 1 is gone [lost peer 1]"
NEW = "W0000 00:00:1795402612.248421   24724 op_kernel.cc:1845] "
OLD = "2024-05-01 10:00:00.123456: W tensorflow/core/framework/op_kernel.cc:1827] "
USERS_TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/me/train.py", line 3, in train',
    "KeyError: 'x'",
]


def test_both_messages_of_an_interrupted_step_are_left_out_with_their_tracebacks():
    second = f"{NEW.replace('op_kernel.cc:1845', 'local_rendezvous.cc:412')}Local rendezvous is aborting: {FAILED}"
    lines = ["before", NEW + FAILED, *FRAMES, second, *FRAMES, "\t [[{{node PyFunc}}]]", "after", ""]
    assert InterruptedSteps().shown(lines) == ["before", "after", ""]


def test_messages_of_earlier_versions_of_tensorflow_are_left_out():
    assert InterruptedSteps().shown([OLD + FAILED, *FRAMES, "after"]) == ["after"]


def test_messages_may_arrive_in_pieces():
    steps = InterruptedSteps()
    shown = [line for each in [NEW + FAILED, *FRAMES, "after"] for line in steps.shown([each])]
    assert shown == ["after"]


def test_tracebacks_of_the_users_around_it_are_shown():
    lines = [*USERS_TRACEBACK, NEW + FAILED, *FRAMES, *USERS_TRACEBACK]
    assert InterruptedSteps().shown(lines) == [*USERS_TRACEBACK, *USERS_TRACEBACK]


def test_a_traceback_after_a_message_without_one_is_shown():
    assert InterruptedSteps().shown([NEW + FAILED, "a line", *USERS_TRACEBACK]) == ["a line", *USERS_TRACEBACK]


def test_other_warnings_of_tensorflow_are_shown():
    warning = f"{NEW}RESOURCE_EXHAUSTED: OOM when allocating tensor"
    preamble = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
    onednn = "I0000 00:00:1795402607.531491   24690 port.cc:153] oneDNN custom operations are on. You may see"
    assert InterruptedSteps().shown([preamble, onednn, warning, *USERS_TRACEBACK]) == [warning, *USERS_TRACEBACK]

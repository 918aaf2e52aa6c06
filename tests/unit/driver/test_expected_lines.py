"""The frameworks' messages about interrupted steps are left out, and nothing else."""

from spark_elastic.driver.expected_lines import ExpectedLines

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
    assert ExpectedLines().shown(lines) == ["before", "after", ""]


def test_messages_of_earlier_versions_of_tensorflow_are_left_out():
    assert ExpectedLines().shown([OLD + FAILED, *FRAMES, "after"]) == ["after"]


def test_messages_may_arrive_in_pieces():
    steps = ExpectedLines()
    shown = [line for each in [NEW + FAILED, *FRAMES, "after"] for line in steps.shown([each])]
    assert shown == ["after"]


def test_tracebacks_of_the_users_around_it_are_shown():
    lines = [*USERS_TRACEBACK, NEW + FAILED, *FRAMES, *USERS_TRACEBACK]
    assert ExpectedLines().shown(lines) == [*USERS_TRACEBACK, *USERS_TRACEBACK]


def test_a_traceback_after_a_message_without_one_is_shown():
    assert ExpectedLines().shown([NEW + FAILED, "a line", *USERS_TRACEBACK]) == ["a line", *USERS_TRACEBACK]


def test_other_warnings_of_tensorflow_are_shown():
    warning = f"{NEW}RESOURCE_EXHAUSTED: OOM when allocating tensor"
    preamble = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
    onednn = "I0000 00:00:1795402607.531491   24690 port.cc:153] oneDNN custom operations are on. You may see"
    assert ExpectedLines().shown([preamble, onednn, warning, *USERS_TRACEBACK]) == [warning, *USERS_TRACEBACK]


NCCL = [
    "[E1126 21:36:07.715219056 ProcessGroupNCCL.cpp:612] [Rank 0] Collective WorkNCCL(SeqNum=41, OpType=ALLREDUCE, "
    "NumelIn=267786, NumelOut=267786, Timeout(ms)=1728000000) raised the following async exception: NCCL error: remote "
    "process exited or there was a network error, NCCL version 2.28.9",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "Last error:",
    "socketProgress: Connection closed by remote peer localhost<47331>",
    "Exception raised from checkForNCCLErrorsInternal at /pytorch/ProcessGroupNCCL.cpp:2770 (most recent call first):",
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fb78ad7305d in /x/libc10.so)",
    "frame #22: _start + 0x25 (0x657a05 in /x/bin/python3)",
    "",
]
DEPRECATED = "[rank1]:[W1126 21:37:14.102401516 init.cpp:3719] Warning: Work::exception API is being deprecated, please"


def test_torchs_stack_of_a_collective_whose_peer_is_gone_is_left_out():
    assert ExpectedLines().shown(["before", DEPRECATED, *NCCL, *NCCL, "after"]) == ["before", "after"]


def test_other_errors_of_nccl_and_lines_between_are_shown():
    other = NCCL[0].replace("remote process exited or there was a network error", "unhandled cuda error")
    lines = [other, *NCCL[1:], "after"]
    assert ExpectedLines().shown(lines) == lines
    assert ExpectedLines().shown([*NCCL[:5], *USERS_TRACEBACK]) == USERS_TRACEBACK

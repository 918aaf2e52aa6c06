from __future__ import annotations

import pytest

from spark_elastic.membership.reasons import LossCause, LossKind, loss_in_words
from spark_elastic.spark.failures import loss_of, loss_of_executor


def words_of(message: str) -> str:
    return loss_in_words(loss_of(message))


PYTHON_EXCEPTION = """\
Job aborted due to stage failure: Task 0 in stage 2.0 failed 4 times, most recent failure: Lost task 0.3 in stage 2.0 \
(TID 9) (127.0.0.2 executor 1): org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was \
thrown from the Python worker: Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 4327, in invoke_udf
    run_process()
  File "/x/agent.py", line 23, in run_agent
    raise ValueError(argument)
{error}
 SQLSTATE: 38000

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:586)
Caused by: java.io.IOException
"""


def test_lost_executor_is_named_with_its_exit_code():
    message = (
        "Job aborted due to stage failure: Task 0 in stage 5.0 failed 4 times, most recent failure: Lost task 0.3 in "
        "stage 5.0 (TID 11) (127.0.0.2 executor 7): ExecutorLostFailure (executor 7 exited caused by one of the "
        "running tasks) Reason: Command exited with code 137\nDriver stacktrace:"
    )
    assert words_of(message) == "executor 7 is lost: Command exited with code 137"


def test_lost_executor_without_a_reason_says_how_it_was_lost():
    message = "ExecutorLostFailure (executor 3 exited unrelated to the running tasks)"
    assert words_of(message) == "executor 3 is lost: exited unrelated to the running tasks"


def test_exception_in_the_agent_is_the_last_line_of_its_traceback():
    assert (
        words_of(PYTHON_EXCEPTION.format(error="ValueError: bad: value")) == "the agent raised ValueError: bad: value"
    )


def test_module_of_ours_that_is_missing_on_the_executors_comes_with_both_remedies():
    reason = words_of(PYTHON_EXCEPTION.format(error="ModuleNotFoundError: No module named 'spark_elastic.task'"))
    assert "cannot import spark_elastic" in reason
    assert "install it" in reason
    assert "sc.addPyFile" in reason


def test_other_missing_modules_are_named():
    reason = words_of(PYTHON_EXCEPTION.format(error="ModuleNotFoundError: No module named 'torch'"))
    assert reason == "the executors cannot import torch: install it into the Python that they run (PYSPARK_PYTHON)"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Job 3 cancelled part of cancelled job group spark_elastic-1-0-1", "the slot's job was cancelled"),
        ("Job 12 cancelled because SparkContext was shut down", "the SparkContext was stopped"),
        ("Cannot call methods on a stopped SparkContext.\nThis stopped...", "the SparkContext was stopped"),
        ("Python worker exited unexpectedly (crashed)", "the agent's Python process died"),
        ('Cannot run program "/no/python3": error=2', "the executor has no program '/no/python3'"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9", "another Python than the driver"),
        (
            "Total size of serialized results of 1 tasks (8.6 MiB) is bigger than spark.driver.maxResultSize (4.0 MiB)",
            "raise spark.driver.maxResultSize",
        ),
    ],
)
def test_known_messages_become_one_readable_line(message, expected):
    assert expected in words_of(message)


def test_exit_code_in_sparks_words_about_an_executor_is_data():
    assert loss_of_executor("Command exited with code 137") == LossCause(
        LossKind.EXITED, code=137, detail="Command exited with code 137"
    )
    assert loss_of_executor("Container marked as failed. Exit status: 143. Diagnostics: ...").code == 143


@pytest.mark.parametrize("words", ["worker lost", "Remote RPC client disassociated: the connection was reset"])
def test_words_that_tell_only_how_an_executor_was_missed_are_a_symptom(words):
    assert loss_of_executor(words).is_symptom
    assert not loss_of_executor("Executor decommission: node is drained").is_symptom


def test_result_that_spark_refuses_is_known_as_such():
    message = "Total size of serialized results of 1 tasks (8.6 MiB) is bigger than spark.driver.maxResultSize (4 MiB)"
    assert loss_of(message).kind is LossKind.RESULT_TOO_BIG

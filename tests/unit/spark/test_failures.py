"""The reason of a failed Spark job is found in Spark's message."""

import pytest

from spark_elastic.data.materialization import WRITES, write_again_if_order_is_lost
from spark_elastic.errors import DataError, StoreError
from spark_elastic.spark.failures import reason_of

STAGE = """Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: Lost task 0.3:
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/opt/spark/python/pyspark/worker.py", line 1247, in main
    process()
{frames}
{error}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:572)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:"""
OURS = '  File "/site-packages/spark_elastic/data/shards.py", line 3, in write\n    x()'
THEIRS = '  File "/home/me/job.py", line 3, in f\n    x()'


@pytest.mark.parametrize(
    ("frames", "error", "kind", "words"),
    [
        (THEIRS, "ValueError: no such colour: 'blurple'", DataError, "ValueError: no such colour: 'blurple'"),
        (THEIRS, "my.package.Odd: two\nlines", DataError, "Odd: two\nlines"),
        (THEIRS, "OSError: the user's own file", DataError, "OSError: the user's own file"),
        (OURS, "OSError: [Errno 28] No space left", StoreError, "OSError: [Errno 28] No space left"),
        (OURS, "spark_elastic.errors.StoreError: not shared", StoreError, "not shared"),
    ],
)
def test_error_in_a_task_is_reported_without_frames(frames, error, kind, words):
    assert reason_of(RuntimeError(STAGE.format(frames=frames, error=error))) == (kind, words)


def test_error_of_the_jvm_is_reported_by_its_first_line():
    assert reason_of(RuntimeError("ExecutorLostFailure (executor 1 exited)\n\tat x")) == (
        DataError,
        "ExecutorLostFailure (executor 1 exited)",
    )


class Java:
    def __init__(self, text, cause=None):
        self._text, self._cause = text, cause

    def toString(self):
        return self._text

    def getCause(self):
        return self._cause


def test_innermost_error_of_the_jvm_is_reported():
    error = RuntimeError("An error occurred while calling o1.collect")
    error.java_exception = Java("SparkException: Job aborted", Java("IOException: disk is gone\n\tat x"))
    assert reason_of(error) == (DataError, "IOException: disk is gone")


# What the scheduler of Spark 3.5, 4.0 and 4.3 says.
LOST_ORDER = [
    "org.apache.spark.SparkException: Job aborted due to stage failure: A shuffle map stage with indeterminate output "
    "was failed and retried. However, Spark cannot rollback the ResultStage 3 to re-process the input data, and has to "
    "fail this job. Please eliminate the indeterminacy by checkpointing the RDD before repartition and try again.",
    "rolling back due to indeterminate output of shuffle map stage 4",
    "cannot rollback a running result stage, please re-run the query to ensure data correctness",
    "Task with indeterminate results from old attempt succeeded, aborting the stage 3",
]


class Query:
    """A query that fails a number of times with a text."""

    def __init__(self, times, text):
        self.times, self.text, self.runs, self.cleared = times, text, 0, 0

    def write(self):
        self.runs += 1
        if self.runs <= self.times:
            raise RuntimeError(self.text)
        return [self.runs]

    def clear(self):
        self.cleared += 1


@pytest.mark.parametrize("text", LOST_ORDER)
def test_write_is_repeated_if_shuffled_rows_of_no_fixed_order_were_lost(text):
    query = Query(2, text)
    assert write_again_if_order_is_lost(query.write, query.clear) == [3]
    assert query.cleared == 2


def test_write_is_repeated_a_few_times_and_for_this_reason_only():
    query = Query(1000, LOST_ORDER[0])
    with pytest.raises(RuntimeError, match="indeterminate output"):
        write_again_if_order_is_lost(query.write, query.clear)
    assert (query.runs, query.cleared) == (WRITES, WRITES - 1)
    other = Query(1, "ExecutorLostFailure (executor 1 exited caused by one of the running tasks)")
    with pytest.raises(RuntimeError):
        write_again_if_order_is_lost(other.write, other.clear)
    assert (other.runs, other.cleared) == (1, 0)

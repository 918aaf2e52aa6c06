"""What `test_matrix.py` tries in each of its rows."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that is tried in each row.

    Attributes:
        about: What it shows.
        tests: Tests of pytest, or a program and its arguments.
        needs: Distributions without which it cannot be run.
        oldest_spark: The first version of Spark that can run it.
    """

    about: str
    tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("torch",)
    program: tuple[str, ...] = ()
    oldest_spark: tuple[int, int] = (3, 5)


_ML = "tests/integration/ml"
_LOCAL = "tests/integration/spark/test_local_mode.py"
CHECKS = {
    "imports": Check(
        "every module of the package is imported", program=("scripts/test_matrix.py", "--import-all"), needs=()
    ),
    "quickstart": Check(
        "the code of docs/quickstart.md, from top to bottom",
        program=("tests/integration/page_runner.py", "outcome.json", "quickstart.md"),
    ),
    "kills": Check(
        "a training loop of one's own outlives `kill -9` of each of its workers and of a whole executor",
        (
            f"{_LOCAL}::test_workers_die_at_every_stage_of_a_round",
            "tests/integration/spark/test_local_cluster.py::test_an_executor_takes_its_two_workers_and_two_others_go_on",
        ),
    ),
    "torch": Check(
        "`ElasticTorchEstimator` in a Pipeline, with a CrossValidator and on a stream; fit, save, load, transform",
        (
            f"{_ML}/test_estimator.py::test_a_pipeline_learns_digits_and_is_saved_and_loaded_as_a_whole",
            f"{_ML}/test_estimator.py::test_a_cross_validator_finds_the_better_model_and_each_fold_is_written_once",
            f"{_ML}/test_estimator.py::test_a_saved_estimator_trains_as_the_one_that_was_saved",
            f"{_ML}/test_transform.py",
        ),
    ),
    "torch kill": Check(
        "a fit loses an executor and ends with the result of an undisturbed one",
        (f"{_ML}/test_every_moment.py::test_rank_0_and_its_executor_may_die_at_the_end",),
    ),
    "keras": Check(
        "`ElasticKerasEstimator` likewise",
        (
            f"{_ML}/test_estimator.py::test_a_pipeline_learns_digits_and_is_saved_and_loaded_as_a_whole",
            f"{_ML}/test_keras_transform.py",
        ),
        needs=("torch", "keras", "tensorflow-cpu"),
    ),
    "data": Check(
        "columns of all types are written by Spark and read back",
        ("tests/integration/data/test_types.py", "tests/integration/data/test_bad_input.py"),
        needs=(),
    ),
    "run": Check(
        "`run` with fewer slots than workers",
        (
            f"{_LOCAL}::test_more_workers_than_there_can_ever_be_slots_are_refused_at_once",
            f"{_LOCAL}::test_a_job_that_can_do_with_the_slots_there_are_starts_with_them",
        ),
    ),
    "protocol": Check(
        "membership, messages and driver: unit tests",
        ("tests/unit/membership", "tests/unit/wire", "tests/unit/driver"),
        needs=(),
    ),
    "connect": Check(
        "Spark Connect: a kill survived, an estimator fitted, saved and loaded",
        (
            "tests/integration/connect/test_run.py::test_training_survives_the_kill_of_a_worker_and_of_an_agent",
            "tests/integration/connect/test_estimators.py",
        ),
        needs=("torch", "keras", "grpcio-status"),
        oldest_spark=(4, 0),
    ),
}

"""Executors that leave are reported once, by whatever Spark says of them."""

import pytest

from spark_elastic.membership.events import ExecutorDecommissioned, ExecutorLost
from spark_elastic.membership.reasons import LossCause, LossKind
from spark_elastic.spark.executors import ExecutorWatch
from tests.unit.spark.jvm import Application


def watch_of(application):
    """A watch without a listener that has looked once, and what it posts."""
    watch, posted = ExecutorWatch(application.sc), []
    watch._post = posted.append
    look(watch)
    return watch, posted


def look(watch):
    watch._compare()
    watch._ask_for_decommissions()


@pytest.mark.parametrize("new", [[], ["20"]], ids=["no new executor", "a new executor makes up for its slots"])
def test_a_decommission_is_reported_once(new):
    application = Application(20)
    watch, posted = watch_of(application)
    application.leaving["1"] = True
    application.active.remove("1")
    application.active += new
    look(watch)
    look(watch)
    assert posted == [ExecutorDecommissioned("1")]


def test_a_decommission_that_spark_explains_later_is_reported_then():
    application = Application(20)
    watch, posted = watch_of(application)
    application.leaving["7"] = False
    application.active.remove("7")
    look(watch)
    look(watch)
    assert posted == []
    application.leaving["7"] = True
    look(watch)
    assert posted == [ExecutorDecommissioned("7")]


def test_an_executor_that_is_no_longer_listed_is_lost():
    application = Application(3)
    watch, posted = watch_of(application)
    application.active.remove("1")
    look(watch)
    assert posted == [ExecutorLost("1", LossCause(LossKind.EXECUTOR_UNLISTED))]

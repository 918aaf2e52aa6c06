"""What goes into each Spark task, and what is broadcast once for all."""

import pickle

import pytest

pytest.importorskip("pyspark")

from spark_elastic.spark import classic
from spark_elastic.task import agent, spark_agent
from spark_elastic.wire.messages import LaunchSpec


@pytest.fixture
def sent(monkeypatch):
    """(payload, shared) of the launcher that a classic cluster builds for a spec."""

    def made_for(spec):
        kept = []

        class Launcher:
            def __init__(self, sc, entry, payload_for_slot, on_ended, *, shared, description, profile):
                kept.append((payload_for_slot(0), shared))

        monkeypatch.setattr(classic, "SparkLauncher", Launcher)
        classic.ClassicCluster(None)._launchers(spec, agent=None)(lambda end: None)
        return kept[0]

    return made_for


def spec(function):
    return LaunchSpec("job", (("10.0.0.1", 1),), b"k" * 32, function, 60.0, "this test")


def test_a_large_function_is_shared_and_the_key_stays_in_the_small_task(sent):
    large = spec(bytes(3_000_000))
    payload, shared = sent(large)
    assert shared == large.function
    assert large.key not in shared
    assert len(payload) < 100_000
    assert pickle.loads(payload).key == large.key


def test_a_small_function_travels_in_the_task(sent):
    small = spec(b"f")
    payload, shared = sent(small)
    assert shared is None
    assert pickle.loads(payload) == small


def test_task_reassembles_the_launch_spec(monkeypatch):
    monkeypatch.setattr(agent, "run_agent", lambda spec, *rest: spec)
    assert spark_agent.run_in_task(0, 1, pickle.dumps(spec(b"")), b"large") == spec(b"large")
    assert spark_agent.run_in_task(0, 1, pickle.dumps(spec(b"f"))) == spec(b"f")

"""Soak tests run only where they are asked for: `pytest -m soak`. No example of a property has a deadline."""

import os
import signal

import hypothesis
import pytest

# Spark's JVMs live for seconds here: they start in less than half of the processor's time without the second compiler
for _name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ.setdefault(_name, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto")

# Threads of torch that have nothing to do sleep. Otherwise they spin, and where several processes share two cores, most
# of the processor's time goes into that. Read when torch is loaded, and inherited by all processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# a shell starts what it runs in the background deaf to Ctrl-C, which tests send to themselves and to their programs
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is slow now and then
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(config, items):
    if "soak" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="minutes long; run it with -m soak")
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(skip)

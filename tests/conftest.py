"""Tests marked `nightly` run with `--nightly`, or when one is named. No example of a property has a deadline."""

import os
import re
import signal

import hypothesis

# Spark's JVMs live for seconds here: they start in less than half of the processor's time without the second compiler
for _name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ.setdefault(_name, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto")

# Threads of torch that have nothing to do sleep. Otherwise they spin, and where several processes share two cores, most
# of the processor's time goes into that. Read when torch is loaded, and inherited by all processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# a shell starts what it runs in the background deaf to these, which tests send to themselves and to their programs
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# a busy machine is slow now and then
hypothesis.settings.register_profile("day", deadline=None, max_examples=30)
hypothesis.settings.register_profile("night", deadline=None)


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="run the tests that are marked nightly, too")


def by_night(config):
    return config.getoption("nightly") or "nightly" in config.getoption("markexpr")


def pytest_configure(config):
    hypothesis.settings.load_profile("night" if by_night(config) else "day")


def named_tests(config):
    """Return the path and the name of each test that is named."""
    named = [argument.partition("::") for argument in config.args if "::" in argument]
    return [((config.invocation_params.dir / path).resolve(), name) for path, _, name in named]


NIGHTLY_MODULE = re.compile(r"^pytestmark = (\[[^]=]*)?pytest\.mark\.nightly\b", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Leave out modules that are nightly as a whole: some import what takes seconds, such as MLflow or Lightning."""
    if by_night(config) or not collection_path.match("test_*.py"):
        return None
    named = any(path == collection_path for path, _ in named_tests(config))
    return None if named or not NIGHTLY_MODULE.search(collection_path.read_text()) else True


def pytest_collection_modifyitems(config, items):
    if by_night(config):
        return
    named = named_tests(config)

    def is_named(item):
        own = item.nodeid.partition("::")[2]
        return any(item.path == path and (own + "[").startswith((name + "[", name + "::")) for path, name in named)

    left_out = [item for item in items if "nightly" in item.keywords and not is_named(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]

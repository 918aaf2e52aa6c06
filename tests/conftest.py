"""Soak tests run only where they are asked for: `pytest -m soak`. No example of a property has a deadline."""

import hypothesis
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is slow now and then
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(config, items):
    if "soak" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="minutes long; run it with -m soak")
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(skip)

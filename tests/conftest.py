"""Soak tests run only where they are asked for: `pytest -m soak`."""

import pytest


def pytest_collection_modifyitems(config, items):
    if "soak" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="minutes long; run it with -m soak")
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(skip)

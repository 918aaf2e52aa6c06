"""Cases of parametrized tests: which are run by night alone, and which are run now."""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

import pytest


def by_night(cases: Collection[Any], but: Container[Any] = ()) -> list[Any]:
    """Return the cases with the mark `nightly`, but these without; a tuple has a value for each parameter."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [[] if case in but else pytest.mark.nightly for case in cases]
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]


def asked(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the cases of the fixture's module that are run now, for a fixture that prepares all of them at once."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(i.callspec.params[parameter] for i in items if parameter in i.callspec.params))

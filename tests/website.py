"""The modules that make the site, which are in no package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from tests.pages import ROOT


def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"website_{name}", ROOT / "scripts" / "website" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api = _loaded("api")
diagrams = _loaded("diagrams")
links = _loaded("links")

"""Old names of modules that saved models, estimators and pickles of earlier versions hold.

A pickle names the module of each class. The modules below have moved since such files were written; importing an old
name gives the module that replaced it. Add a row when a class that can be stored moves to another module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "spark_elastic.driver.host_discovery": "spark_elastic.driver.hosts",
    "spark_elastic.driver.local_launcher": "spark_elastic.driver.launcher",
    "spark_elastic.ml.history": "spark_elastic.reporting.history",
    "spark_elastic.ml.keras.archives": "spark_elastic.ml.keras.serialization",
    "spark_elastic.ml.keras.sealing": "spark_elastic.ml.keras.pickling",
    "spark_elastic.ml.torch.batches": "spark_elastic.ml.torch.objective",
    # under these names Horovod has the same functions
    "spark_elastic.tensorflow.functions": "spark_elastic.tensorflow.operations",
    "spark_elastic.torch.functions": "spark_elastic.torch.operations",
}
"""Old dotted name of a module to its present one."""


class _MovedModules(MetaPathFinder, Loader):
    """Import the module that replaced an old name, and register it under the old name as well."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MOVED[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it has been executed already, under its present name."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make the old names importable. Calling it again changes nothing."""
    if not any(isinstance(each, _MovedModules) for each in sys.meta_path):
        sys.meta_path.append(_MovedModules())

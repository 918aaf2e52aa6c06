"""An alias of `spark_elastic.keras` under Horovod's name for it, with the same modules and objects."""

from __future__ import annotations

import sys

import spark_elastic.keras
from spark_elastic.keras import callbacks, elastic, functions, optimizer

for _name, _module in {
    "": spark_elastic.keras,
    ".callbacks": callbacks,
    ".elastic": elastic,
    ".functions": functions,
    ".optimizer": optimizer,
}.items():
    sys.modules[__name__ + _name] = _module

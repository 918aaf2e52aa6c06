"""An alias of `spark_elastic.keras` under Horovod's name for it, with the same modules and objects."""

from __future__ import annotations

import sys

import spark_elastic.keras
from spark_elastic.keras import callbacks, compression, elastic, operations, optimizer, saving

for _name, _module in {
    "": spark_elastic.keras,
    ".callbacks": callbacks,
    ".compression": compression,
    ".elastic": elastic,
    ".operations": operations,
    ".optimizer": optimizer,
    ".saving": saving,
}.items():
    sys.modules[__name__ + _name] = _module

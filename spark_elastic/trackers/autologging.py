"""What a fit does while MLflow's autologging of Spark ML is on (`mlflow.autolog()`).

MLflow itself logs the settings and, if its class is in the allowlist, the model. It knows nothing of epochs and
workers, which `mlflow.autologging_callbacks` adds to the run that MLflow has started.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_AUTOLOGGER = "mlflow.pyspark.ml"


def is_on() -> bool:
    """Return True if MLflow logs fits of Spark ML estimators by itself."""
    if _AUTOLOGGER not in sys.modules:
        return False
    try:
        utils: Any = import_module("mlflow.utils.autologging_utils")
        return not utils.autologging_is_disabled("pyspark.ml")
    except Exception:  # not a public function: another version may not have it
        return False


def reads_settings() -> bool:
    """Return True if the caller's caller is MLflow's autologging, which would write the `str` of None and objects."""
    return _AUTOLOGGER in sys.modules and sys._getframe(2).f_globals.get("__name__") == _AUTOLOGGER


def logs_model(model: Any) -> bool:
    """Return True if autologging logs this Spark model after the fit, because it is on and the class is allowed."""
    if not is_on():
        return False
    try:
        autologger: Any = import_module(_AUTOLOGGER)
        utils: Any = import_module("mlflow.utils.autologging_utils")
        wanted = utils.get_autologging_config("pyspark.ml", "log_models", True)
        return bool(wanted and autologger._should_log_model(model))
    except Exception:  # not public functions: another version may not have them
        return False

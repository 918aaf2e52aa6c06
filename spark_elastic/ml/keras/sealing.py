"""Old path of functions that pickles in saved estimators and models name; use `ml.keras.pickling` instead.

A stage that an earlier version saved with classes or functions of the user holds a pickle that calls these two.
"""

from spark_elastic.ml.keras.pickling import load_model as _compiled
from spark_elastic.ml.keras.pickling import load_object as _made

__all__ = ["_compiled", "_made"]

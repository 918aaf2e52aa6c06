"""Old path of a function that pickles in saved estimators and models name; use `ml.keras.pickling` instead.

A stage that an earlier version saved with classes or functions of the user holds a pickle that calls `archives.loads`.
"""

from spark_elastic.ml.keras.pickling import load_model as loads

__all__ = ["loads"]

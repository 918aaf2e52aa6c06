"""The command line as `python -m spark_elastic`, and the file for spark-submit (`spark-elastic --submit-file`)."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if not __package__:
        # spark-submit runs this file by its path, so Python has put this folder first on sys.path, where `import torch`
        # would find spark_elastic/torch. Remove it, and add its parent last in case the package is not installed.
        _here = os.path.dirname(os.path.abspath(__file__))
        if os.path.exists(os.path.join(_here, "__init__.py")):
            sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
            sys.path.append(os.path.dirname(_here))

    from spark_elastic.cli import main

    sys.exit(main())

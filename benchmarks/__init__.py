"""The benchmark command: compares fastrnn with torch.nn, a step loop and other installed packages in one run.

Installed as ``fastrnn.benchmarks`` (``fastrnn bench``); from a checkout also ``python -m benchmarks``.
"""

import sys
from pathlib import Path

# From a checkout, `python -m` puts its folder first on the path. If fastrnn is not built there, the benchmarks measure
# the installed package.
_root = Path(__file__).resolve().parents[1]
if __name__ == "benchmarks" and not any((_root / "fastrnn").glob("_C.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _root]

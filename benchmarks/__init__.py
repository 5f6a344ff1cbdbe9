"""The benchmark command: compares fastrnn with torch.nn, a step loop and other installed packages in one run.

Installed as ``fastrnn.benchmarks`` (``fastrnn bench``); from a checkout also ``python -m benchmarks``.
"""

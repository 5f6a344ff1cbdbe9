"""``python -m benchmarks``: the same command as ``fastrnn bench``, from a checkout."""

from .command import bench

if __name__ == "__main__":
    bench(prog_name="python -m benchmarks")

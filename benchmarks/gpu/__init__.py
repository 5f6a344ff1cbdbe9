"""The programs that `python -m benchmarks.gpu_check` runs on a GPU, each in its own process."""

"""What `python -m benchmarks.gpu_check` runs on a GPU, each as its own process."""

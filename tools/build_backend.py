"""The build backend of pyproject.toml: setuptools', which asks for an nvcc where a driver wants one.

With FASTRNN_CUDA=on, or auto on a machine with an NVIDIA driver, and no nvcc, the compiler comes from PyPI.
"""

from __future__ import annotations

from cuda_toolkit import driver_version, find_nvcc, mode
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

# All that nvcc needs to compile and link a program with the static runtime.
_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
# The first CUDA whose packages have nvcc itself: those of CUDA 12 (nvidia-cuda-nvcc-cu12) have its parts alone.
_FIRST = 13


def cuda_requirements() -> list[str]:
    """Packages with an nvcc that is not newer than the driver; none where one is there or none is wanted."""
    wanted = mode()
    if wanted == "off" or find_nvcc() is not None:
        return []
    version = driver_version()
    if version is None:
        if wanted == "auto":
            return []
        version = (_FIRST, 0)  # compiled here, run elsewhere: for every driver that serves CUDA 13
    major, minor = version
    if major < _FIRST:
        found = f"the NVIDIA driver serves CUDA {major}.{minor}, for which PyPI has no nvcc"
        instead = "update the driver to one for CUDA 13, or install a CUDA 12 toolkit and set CUDA_HOME"
        if wanted == "on":
            raise SystemExit(f"FASTRNN_CUDA=on: {found}: {instead}")
        print(f"fastrnn: no nvcc, and {found}: {instead}; building without CUDA")
        return []
    print(f"fastrnn: no nvcc found: asking PyPI for CUDA {major}.{minor}")
    # Packages of a toolkit have their own patch numbers, and nvidia-cuda-cccl its own minor ones.
    return [f"{name}>={major},<{major}.{minor + 1}" for name in _PACKAGES]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + cuda_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + cuda_requirements()

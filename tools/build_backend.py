"""The build backend of pyproject.toml: setuptools' own, which here also requires an nvcc from PyPI if one is needed.

It is needed with FASTRNN_CUDA=on, or auto on a machine with an NVIDIA driver, if there is no nvcc.
"""

from __future__ import annotations

from cuda_toolkit import driver_version, find_nvcc, mode
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

# The packages that nvcc needs to compile and link a program with the static runtime.
_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
# The first CUDA version whose packages contain nvcc; those of CUDA 12 (nvidia-cuda-nvcc-cu12) only have its parts.
_FIRST = 13


def cuda_requirements() -> list[str]:
    """Packages with an nvcc that is not newer than the driver; none if there is an nvcc, or none is needed."""
    wanted = mode()
    if wanted == "off" or find_nvcc() is not None:
        return []
    version = driver_version()
    if version is None:
        if wanted == "auto":
            return []
        version = (_FIRST, 0)  # a build for other machines: runs with every driver for CUDA 13
    major, minor = version
    if major < _FIRST:
        found = f"the NVIDIA driver serves CUDA {major}.{minor}, for which PyPI has no nvcc"
        instead = "update the driver to one for CUDA 13, or install a CUDA 12 toolkit and set CUDA_HOME"
        if wanted == "on":
            raise SystemExit(f"FASTRNN_CUDA=on: {found}: {instead}")
        print(f"fastrnn: no nvcc, and {found}: {instead}; building without CUDA")
        return []
    print(f"fastrnn: no nvcc found: asking PyPI for CUDA {major}.{minor}")
    # Packages of a toolkit differ in patch numbers, and nvidia-cuda-cccl also in minor numbers.
    return [f"{name}>={major},<{major}.{minor + 1}" for name in _PACKAGES]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + cuda_requirements()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + cuda_requirements()

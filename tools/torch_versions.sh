#!/usr/bin/env bash
# Runs the tests of what can differ between versions of torch beside each of them, with the installed fastrnn's source tree
# and compiled core (pip install -e .), which contain no torch code: tools/torch_versions.sh 2.6.0 2.8.0 2.10.0
# Each gets a virtual environment of its own, some GB of CUDA libraries included, which is removed afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
tests="tests/test_layer.py tests/test_autograd.py tests/test_compile.py tests/test_routes.py tests/test_func.py
       tests/test_modules.py tests/test_convert.py tests/test_errors.py"
packages="pytest hypothesis h5py safetensors matplotlib numpy click rich"
failed=""
for version in "$@"; do
  folder=$(mktemp -d)
  python3 -m venv "$folder"
  "$folder/bin/pip" install -qq "torch==$version" $packages
  echo "== torch $version"
  PYTHONPATH=$PWD "$folder/bin/python" -m pytest --no-header $tests || failed="$failed $version"
  rm -rf "$folder"
done
[ -z "$failed" ] || { echo "failed beside torch$failed"; exit 1; }

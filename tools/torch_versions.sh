#!/usr/bin/env bash
# Tests what can differ between versions of torch with each of them, all with one wheel of this tree, which contains no
# torch code: tools/torch_versions.sh 2.6.0 2.8.0 2.10.0
# Each gets its own virtual environment with some GB of CUDA libraries, which is removed afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
tests="tests/test_layer.py tests/test_autograd.py tests/test_compile.py tests/test_routes.py tests/test_func.py
       tests/test_modules.py tests/test_convert.py tests/test_errors.py"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
FASTRNN_CUDA=off python3 -m pip wheel -q --no-deps -w "$folder" .
failed=""
for version in "$@"; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -qq "torch==$version" "$(ls "$folder"/*.whl)[test]"
  echo "== torch $version"
  "$folder/$version/bin/python" -m pytest --no-header $tests || failed="$failed $version"
  rm -rf "${folder:?}/$version"
done
[ -z "$failed" ] || { echo "failed beside torch$failed"; exit 1; }

#!/usr/bin/env bash
# Tests what can differ between versions of torch with each of them, all with one wheel, which contains no torch code:
# tools/torch_versions.sh [WHEEL, default a CPU build of this tree] 2.6.0 2.8.0 2.10.0
# PYTHON selects the Python (default python3). Each version gets its own virtual environment with some GB of
# CUDA libraries, which is removed afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."
tests="tests/test_layer.py tests/test_autograd.py tests/test_compile.py tests/test_routes.py tests/test_func.py
       tests/test_modules.py tests/test_convert.py tests/test_errors.py"
python="${PYTHON:-python3}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ "$1" == *.whl ]]; then
  wheel="$1"
  shift
else
  FASTRNN_CUDA=off "$python" -m pip wheel -q --no-deps -w "$folder" .
  wheel=$(ls "$folder"/*.whl)
fi
failed=""
for version in "$@"; do
  "$python" -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -qq --no-compile "torch==$version" "$wheel[test]"
  echo "== torch $version"
  "$folder/$version/bin/pytest" --no-header $tests || failed="$failed $version"
  rm -rf "${folder:?}/$version"
done
[ -z "$failed" ] || { echo "failed beside torch$failed"; exit 1; }

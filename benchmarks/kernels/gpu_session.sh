#!/usr/bin/env bash
# Build, test, sanitize and time the kernels on a machine with one Hopper GPU, in one go, within about four minutes.
# A step that fails does not stop the rest; results and logs go to OUT (default build/gpu-session).
#   STEPS="build test sanitize bench"   COMMIT=what to record where there is no git   BENCH_FLAGS="--variants"
set -u
cd "$(dirname "$0")/../.."
out=${OUT:-build/gpu-session}
mkdir -p "$out"
steps=${STEPS:-build test bench sanitize}
pytest="python3 -m pytest -c /dev/null --rootdir=. --confcutdir=tests/gpu -p no:cacheprovider --import-mode=importlib -W ignore -q"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
summary=$out/summary.txt
: >"$summary"

step() { # name, seconds at most, command…
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "== $name"
  timeout "$limit" "$@" >"$out/$name.log" 2>&1
  local code=$?
  echo "$name: exit $code, $((SECONDS - start)) s" | tee -a "$summary"
  return $code
}

for part in $steps; do
  case $part in
  build)
    step build 150 bash csrc/build.sh && cp build/ptxas.txt "$out/" || tail -30 "$out/build.log"
    ;;
  test)
    step test 100 $pytest --tb=short tests/gpu
    grep -E '^(FAILED|ERROR)|passed|failed|^E  ' "$out/test.log" | cut -c1-300 | tail -40
    ;;
  sanitize)
    # A part of the cases: all kernels, odd lengths, several query tokens, both ways of cutting.
    step memcheck 100 compute-sanitizer --tool memcheck --error-exitcode 9 --launch-timeout 60 \
      $pytest tests/gpu -k "(edges and (16 or 32 or 128)) or any_cut or (several and 5) or (mla_store and 65) or (rms_norm and 7)"
    grep -E 'ERROR SUMMARY|Invalid|passed|failed|=========.*(at |by )' "$out/memcheck.log" | sort | uniq -c | sort -rn | head -20
    ;;
  memcheck-all)
    step memcheck-all 120 compute-sanitizer --tool memcheck --error-exitcode 9 --launch-timeout 60 $pytest tests/gpu -k "not very_long"
    grep -E 'ERROR SUMMARY|Invalid|passed|failed' "$out/memcheck-all.log" | sort | uniq -c | sort -rn | head
    ;;
  synccheck)
    step synccheck 60 compute-sanitizer --tool synccheck --error-exitcode 9 $pytest tests/gpu -k "any_cut or (edges and (16 or 128))"
    grep -E 'ERROR SUMMARY|=========.*(Barrier|Divergent)|passed|failed' "$out/synccheck.log" | cut -c1-200 | sort | uniq -c | sort -rn | head
    ;;
  profile)
    for shape in 16,1,4096,0 16,32,4096,0 16,128,8192,0 128,1,4096,2 128,128,8192,2; do
      step "ncu-$shape" 40 ncu --clock-control none --set full -k regex:mla_ -s 3 -c 2 \
        python3 benchmarks/kernels/bench.py --once "$shape"
      grep -E 'Duration|DRAM Throughput|L2 Cache Throughput|L1/TEX Hit|Mem Pipes|Executed Ipc|Stall|stall|Tensor|Shared|Bank' \
        "$out/ncu-$shape.log" | head -30
    done
    cat "$out"/ncu-*.log >"$out/ncu.log"
    rm -f "$out"/ncu-*.log
    ;;
  bench)
    step bench 120 python3 benchmarks/kernels/bench.py --out "$out/h200-kernels.json" \
      --commit "${COMMIT:-unknown}" ${BENCH_FLAGS:---variants}
    grep -v '^{' "$out/bench.log"
    step bench-linear 60 python3 benchmarks/kernels/bench_linear.py --out "$out/h200-linear.json" \
      --commit "${COMMIT:-unknown}"
    grep -v '^{' "$out/bench-linear.log"
    ;;
  esac
done
cat "$summary"

#!/usr/bin/env bash
# Build, test, sanitize and time the kernels on a machine with one Hopper GPU, in one go, within about four minutes.
# A step that fails does not stop the rest; results and logs go to OUT (default build/gpu-session).
#   STEPS="build test bench memcheck synccheck racecheck profile"   SANITIZE="test files to watch"   SANITIZE_K="pytest -k"   SANITIZE_S=170
#   COMMIT=what to record where there is no git   BENCH_FLAGS="--variants"
set -u
cd "$(dirname "$0")/../.."
out=${OUT:-build/gpu-session}
mkdir -p "$out"
steps=${STEPS:-build test bench memcheck synccheck}
pytest="python3 -m pytest -c /dev/null --rootdir=. --confcutdir=tests/gpu -p no:cacheprovider --import-mode=importlib -W ignore -q"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
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
  memcheck | synccheck | racecheck)
    # Every test file in a process of its own, side by side; only our own kernels are watched. memcheck sees a step out of
    # a tensor where each tensor is an allocation of its own; captured graphs and the executor need PyTorch's pools.
    mkdir -p "$out/$part"
    start=$SECONDS
    for file in ${SANITIZE:-tests/gpu/test_*.py}; do
      name=$(basename "$file" .py)
      (
        select="not very_long"
        if [ "$part" = memcheck ] && ! [[ $name =~ executor|transformers|memory|weights ]]; then
          export PYTORCH_NO_CUDA_MEMORY_CACHING=1
          select="$select and not graph"
        fi
        timeout "${SANITIZE_S:-170}" compute-sanitizer --tool "$part" --error-exitcode 9 --kernel-name kns=rorqual \
          $pytest -k "${SANITIZE_K:-$select}" "$file" >"$out/$part/$name.log" 2>&1
        echo "exit $?" >>"$out/$part/$name.log"
      ) &
    done
    wait
    echo "$part: $((SECONDS - start)) s" | tee -a "$summary"
    for log in "$out/$part"/*.log; do
      echo "  $(basename "$log" .log): $(grep -oE '[0-9]+ (passed|failed)[^=]*' "$log" | tail -1)," \
        "$(grep -oE 'ERROR SUMMARY.*|Device not supported' "$log" | tail -1), $(tail -1 "$log")" | tee -a "$summary"
      grep -E '=========.*(Invalid|Barrier|Divergent|race|Race|Error)' "$log" | sort | uniq -c | sort -rn | head -4
    done
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

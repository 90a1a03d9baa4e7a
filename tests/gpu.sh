#!/usr/bin/env bash
# All that tests/gpu_record.json holds of one GPU: the suite, the large tests, four sanitizers.
#
#   bash tests/gpu.sh [FOLDER [SECONDS]]
#
# Logs and a copy of the record go to FOLDER (default: gpu-logs); SECONDS bounds each sanitizer
# (default 600). Tests are spread over the processors where pytest-xdist is installed.
# tests/record.py says why racecheck leaves some tests out.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu-logs} limit=${2:-600}
mkdir -p "$out"
python=${PYTHON:-python3}
record=tests/gpu_record.json

spread=()
if $python -c "import xdist" 2>/dev/null; then
  spread=(-n "$(($(nproc) - 1))")
fi
export OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1  # many processes, one thread each

began=$SECONDS
say() { echo "$((SECONDS - began)) s: $*"; }

$python -m pytest -q "${spread[@]}" -m "gpu and not multigpu and not large" \
  --record $record >"$out/suite.log" 2>&1
failed=$?
say "suite: $(tail -n 1 "$out/suite.log")"

sanitize() {  # tool, further arguments of pytest
  local tool=$1
  shift
  timeout "$limit" compute-sanitizer --tool "$tool" $python -m pytest -q -p no:cacheprovider \
    -m "gpu and smoke and not large" "$@" >"$out/$tool.log" 2>&1
  say "$tool: $(grep SUMMARY "$out/$tool.log" | tail -n 1)"
}
sanitize memcheck &
sanitize racecheck -k "not smoke_hopper and not teams" &
sanitize synccheck &
sanitize initcheck &
$python -m pytest -q -m large --record $record --record-as large >"$out/large.log" 2>&1 || failed=1
say "large: $(tail -n 1 "$out/large.log")"
wait

logs=()
for tool in memcheck racecheck synccheck initcheck; do logs+=("$tool=$out/$tool.log"); done
$python -m tests.record --sanitizer "${logs[@]}" || failed=1
cp $record "$out"
exit $failed

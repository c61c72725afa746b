#!/usr/bin/env bash
# check.sh - what needs a GPU: the same bits as the CPU, no bad access, and how fast. Prints a table
# at the end and exits with 1 where a check failed (a bar that is missed is told, not a failure).
#
#   bash tests/cuda/check.sh [--emulated] [--wheels DIR] [--shape "SYNTH OPTIONS"] [--tmp DIR]
#
#   --emulated  the device is emulated on the CPU: every step runs, on small sizes, and its figures
#               mean nothing
#   --wheels    a folder of wheels of what this Python lacks (cffi, tokenizers, jinja2, tqdm): they
#               are unpacked, not installed
#   --shape     the synthetic model of the tokens a second; it needs its size of disk and of RAM
#
# Needs python3 with numpy, setuptools and cffi, make, a C compiler, and nvcc unless emulated. It
# installs nothing, writes to a temporary folder and tests/c/build, and takes under 8 minutes.
set -uo pipefail
cd "$(dirname "$0")/../.."
kind=1 wheels="" shape="--shape qwen3.6-35b-a3b --layers 8" vram=0,1G,3.2G,all tokens=128 runs=3
base=${TMPDIR:-/tmp}
while [ $# -gt 0 ]; do
    case $1 in
    --emulated) kind=emulated shape="--shape tiny" vram=0,1M,1200K,all tokens=24 runs=1 ;;
    --wheels) wheels=$2 && shift ;;
    --shape) shape=$2 && shift ;;
    --tmp) base=$2 && shift ;;
    *) sed -n '2,15s/^# \{0,1\}//p' "$0" && exit 2 ;;
    esac
    shift
done
tmp=$(mktemp -d "$base/mosaic_gpu_XXXXXX")
trap 'rm -rf "$tmp"' EXIT
table=() failed=0

# step NAME COMMAND...: runs it, and keeps a row of the table: its seconds and last line
step() {
    local name=$1 from=$SECONDS rc
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$tmp/log"
    rc=${PIPESTATUS[0]}
    [ "$rc" -eq 0 ] || failed=1
    table+=("$(printf '%-34s %-6s %5d s  %s' "$name" "$([ "$rc" -eq 0 ] && echo ok || echo FAILED)" \
        $((SECONDS - from)) "$(tail -n 1 "$tmp/log" | cut -c 1-90)")")
    return "$rc"
}
skip() { table+=("$(printf '%-34s %-6s %5s    %s' "$1" - - "not run: $2")"); }

python=${PYTHON:-python3}
if [ -n "$wheels" ]; then
    for wheel in "$wheels"/*.whl; do "$python" -m zipfile -e "$wheel" "$tmp/wheels"; done
fi
export PYTHONPATH="$tmp/lib${wheels:+:$tmp/wheels}" PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME="$tmp"
export MAKEFLAGS="-j$(nproc)"

extension() {
    MOSAIC_CUDA=$kind "$python" setup.py -q build --build-base "$tmp/build" --build-lib "$tmp/lib" &&
        (cd "$tmp" && "$python" -m mosaic_c doctor --json) >"$tmp/doctor.json"
    "$python" - "$tmp/doctor.json" <<'PY'
import json, sys
found = [f for f in json.load(open(sys.argv[1]))["findings"] if f["topic"] == "gpu"]
for f in found:
    print(f["level"], f["text"])
sys.exit(not any(f["data"].get("built") and "index" in f["data"] for f in found))
PY
}

if [ "$kind" = emulated ]; then
    gpu=build/plain/test_gpu target=$gpu
else
    gpu=build/plain/gpu/test_gpu target=gpu
fi
program() { make -s -C tests/c "$target" && ls -l "tests/c/$gpu"; } # of kernel cases

sanitizer() { # 0: clean; it prints its summary last
    compute-sanitizer --tool memcheck --error-exitcode 1 "$gpu" small &&
        compute-sanitizer --tool racecheck --error-exitcode 1 "$gpu" small
}

rates() {
    # shellcheck disable=SC2086
    "$python" -m mosaic_c synth "$tmp/model" $shape --quiet &&
        "$python" tests/cuda/tokens.py "$tmp/model" --vram "$vram" --tokens "$tokens" --warm "$tokens" --runs "$runs"
}

verify() { (cd "$tmp" && "$python" -m mosaic_c verify -m demo --vram "$1"); }
table_of_cpu() { # emulated: the best set alone, `make check` has them all
    local best=""
    [ "$kind" = emulated ] && best=$("$python" -c 'from mosaic_c import engine; print(engine.isas()[0])')
    make -s -C tests/c build/plain/kernels && tests/c/build/plain/kernels check $best
}

step "build the extension" extension || { printf '%s\n' "${table[@]}"; exit 1; }
if step "build the kernel cases" program; then
    gpu=$PWD/tests/c/$gpu
    step "kernels, bits of the CPU" "$gpu"
    if [ "$kind" = emulated ]; then
        skip "compute-sanitizer" "there is no device"
    elif ! command -v compute-sanitizer >/dev/null; then
        skip "compute-sanitizer" "it is not installed"
    else
        step "compute-sanitizer" sanitizer
    fi
    step "kernels and copies, timed" "$gpu" bench
    cp "$tmp/log" "$tmp/bench"
fi
step "a model, bits of the CPU" verify "$([ "$kind" = emulated ] && echo 2M || echo 1G)"
if "$python" -c 'import pytest' 2>/dev/null; then
    step "models of every format" "$python" -m pytest -q -rs -p no:cacheprovider tests/test_gpu.py
    grep -q SKIPPED "$tmp/log" && failed=1 table+=("models of every format: tests were skipped")
else
    skip "models of every format" "no pytest"
fi
step "kernels of this CPU" table_of_cpu
step "tokens a second" rates
cp "$tmp/log" "$tmp/tokens"

echo
echo "GPU check, $([ "$kind" = emulated ] && echo 'EMULATED: no figure means anything' ||
    echo "$(uname -m), $(nproc) cores"), ${SECONDS} s"
printf '%s\n' "${table[@]}"
[ -f "$tmp/bench" ] && cat "$tmp/bench"
cat "$tmp/tokens"
[ "$failed" -eq 0 ] && echo "all checks passed" || echo "SOME CHECKS FAILED"
exit "$failed"

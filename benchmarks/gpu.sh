#!/bin/bash
# Everything that is measured on a GPU, in one call; a short table last. Nothing is left behind.
#
#   benchmarks/gpu.sh [OUT]        logs and traces go to the folder OUT (default: a temporary one)
#
# PYTHON is the interpreter that has hrxmp's packages. PEER names a script that is run with the
# argument `decode` and prints a decode_tok_s, for a ratio on the same machine. QUICK=1 skips tests.
set -u -o pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 COLUMNS=200
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${1:-$work}
table=$work/table
begin=$SECONDS

say() { echo "== $* ($((SECONDS - begin)) s)"; }
row() { printf '%-44s %s\n' "$1" "$2" >>"$table"; }
hrxmp() { timeout 120 "$python" -m hrxmp run "$@"; }

# Tokens a second of one test: field LABEL CACHE bench-flags
bench() {
    local label=$1 cache=$2
    shift 2
    hrxmp --cache "$cache" bench -m "$work/1b.gguf" -ctk f16 -ctv f16 -o jsonl "$@" \
        >"$work/bench" 2>>"$out/errors.log"
    row "$label" "$(grep -o '"avg_ts":[0-9.]*\|"stddev_ts":[0-9.]*' "$work/bench" |
        cut -d: -f2 | xargs printf '%9.1f +- %.1f t/s  ')"
}

# A run of the usual test with a trace: start LABEL CACHE launcher-flags
start() {
    local label=$1 cache=$2
    shift 2
    hrxmp --cache "$cache" --trace --trace-output "$out/$label.jsonl" "$@" bench \
        -m "$work/1b.gguf" -p 0 -n 0 -pg 64,16 -b 64 -ub 64 -r 2 --no-warmup -o jsonl \
        >/dev/null 2>>"$out/errors.log"
}

say devices
hrxmp devices | tee "$out/devices.log"
"$python" benchmarks/make_llama_1b.py "$work/1b.gguf" >/dev/null || exit

if [ -z "${QUICK:-}" ]; then
    say device tests
    timeout 240 "$python" -m pytest -q tests/device -k "nvidia and not pocl and not intel" \
        -p no:cacheprovider >"$out/tests.log" 2>&1
    row "device tests" "$(tail -1 "$out/tests.log")"
fi

say start
start cold "$work/a"
start warm "$work/a"
start sync "$work/b" --sync-jit

say speed
bench "pp512, tg128, Q4_K_M" "$work/a" -p 512 -n 128 -r 5
bench "tg64 at depth 2048, Q4_K_M" "$work/a" -p 0 -n 64 -d 2048 -r 3

say pool
timeout 120 "$python" -m benchmarks.gpu_pool 1 16 | tee -a "$table"

if [ -n "${PEER:-}" ]; then
    say peer
    row "peer, decode" "$(timeout 180 "$python" "$PEER" decode gpu 2>/dev/null |
        grep -o '"decode_tok_s": [^]]*]')"
fi

say done
"$python" benchmarks/gpu_start.py cold="$out/cold.jsonl" warm="$out/warm.jsonl" \
    sync="$out/sync.jsonl"
cat "$table"

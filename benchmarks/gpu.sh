#!/bin/bash
# Everything that is measured and checked on a GPU, in one call; a short table last, exit code 1 when
# something in it is wrong. Nothing is left behind.
#
#   benchmarks/gpu.sh [OUT]        logs and traces go to the folder OUT (default: a temporary one)
#
#   STEPS    which: devices tests start speed pool pinning two-runs memory fault sanitizer guard
#            (default: all, and peer where there is one)
#   DEVICE   --device of all of them (default: the first GPU)
#   MODEL    a GGUF file (default: one of Llama-3.2-1B's shape is made)
#   TESTS    of the step tests (default tests/device)
#   WORKERS  of the step pool (default "1 16")
#   PYTHON   the interpreter that has hrxmp's packages (default python3)
#   PEER     a script that, run with `decode gpu`, prints a decode_tok_s: a ratio on one machine
#   LIMIT_S  most seconds for a step (default 240)
#
# Without a GPU, to try the script: DEVICE="Intel(R) OpenCL" MODEL=a-tiny-one.gguf WORKERS="1 2"
set -u -o pipefail
cd "$(dirname "$0")/.." || exit
export PYTHONUNBUFFERED=1 COLUMNS=200
export python=${PYTHON:-python3} work table out device model
work=$(mktemp -d)
export TMPDIR=$work
trap 'rm -rf "$work"' EXIT
trap 'kill "${running:-}" 2>/dev/null; wait; exit 130' INT TERM
out=${1:-$work/out}
mkdir -p "$out" || exit
out=$(cd "$out" && pwd)
table=$work/table
all="devices tests start speed pool pinning two-runs memory fault sanitizer guard ${PEER:+peer}"

row() { printf '%-36s %s\n' "$1" "$2" | tee -a "$table"; }
hrxmp() { "$python" -m hrxmp run --device "$device" "$@"; }
check() { "$python" -m benchmarks.gpu_checks "$1" --device "$device" --model "$model" --out "$out" |
    tee -a "$table"; }

# Tokens a second of one test: bench LABEL bench-flags
bench() {
    local label=$1
    shift
    hrxmp --cache "$work/a" bench -m "$model" -ctk f16 -ctv f16 -o jsonl "$@" >"$work/rows" || return
    row "$label" "$(grep -o '"avg_ts":[0-9.]*\|"stddev_ts":[0-9.]*' "$work/rows" |
        cut -d: -f2 | xargs printf '%9.1f +- %.1f t/s  ')"
}

# A run of the usual test with a trace: start LABEL CACHE launcher-flags
start() {
    local label=$1 cache=$2
    shift 2
    rm -f "$out/$label.jsonl"
    hrxmp --cache "$cache" --trace-output "$out/$label.jsonl" "$@" bench -m "$model" \
        -p 0 -n 0 -pg 64,16 -b 64 -ub 64 -r 2 --no-warmup -o jsonl >"$work/rows"
}

step_devices() {
    hrxmp devices | tee "$out/devices.log"
    row "device" "$("$python" -m benchmarks.gpu_checks device --device "$device")"
}

step_tests() {
    local form verdict=ok
    form=$("$python" -m benchmarks.gpu_checks form --device "$device") || return
    "$python" -m pytest -q "${TESTS:-tests/device}" -k "[$form" -p no:cacheprovider \
        >"$out/tests.log" 2>&1 || verdict=WRONG
    row "device tests, $form" "$(printf '%-5s %s' $verdict "$(tail -n 1 "$out/tests.log")")"
}

step_start() {
    start cold "$work/a" && start warm "$work/a" && start sync "$work/b" --sync-jit
    "$python" benchmarks/gpu_start.py cold="$out/cold.jsonl" warm="$out/warm.jsonl" \
        sync="$out/sync.jsonl" | tee -a "$table"
}

step_speed() {
    bench "pp512, tg128" -p 512 -n 128 -r 5
    bench "tg64 at depth 2048" -p 0 -n 64 -d 2048 -r 3
}

step_pool() {
    # shellcheck disable=SC2086
    "$python" -m benchmarks.gpu_pool --device "$device" ${WORKERS:-1 16} | tee -a "$table"
}

step_pinning() { check pinning; }
step_two_runs() { check two-runs; }
step_memory() { check memory; }
step_fault() { check fault; }
step_sanitizer() { check sanitizer; }
step_guard() { check guard; }

step_peer() {
    row "peer, decode" "$("$python" "$PEER" decode gpu | grep -o '"decode_tok_s": [^]]*]')"
}

device=${DEVICE:-$("$python" -m benchmarks.gpu_checks first-gpu)} || exit
model=${MODEL:-$work/1b.gguf}
[ -e "$model" ] || "$python" benchmarks/make_llama_1b.py "$model" >/dev/null || exit
eval "$(declare -F | sed -n 's/^declare -f/export -f/p')"

for step in ${STEPS:-$all}; do
    echo "== $step ($SECONDS s)"
    begin=$SECONDS
    timeout -k 10 "${LIMIT_S:-240}" bash -uo pipefail -c "trap 'exit 143' TERM; step_${step//-/_}" \
        2>"$out/$step.log" </dev/null &
    running=$!
    wait "$running"
    code=$?
    [ "$code" = 0 ] ||
        row "$step" "FAILED after $((SECONDS - begin)) s with $code: $(tail -n 1 "$out/$step.log")"
done
echo "== done ($SECONDS s)"
cat "$table"
! grep -q ' WRONG \| FAILED ' "$table"

#!/usr/bin/env bash
# What a change must have passed on an NVIDIA GPU, in sections that run alone or together.
#
#     benchmarks/check_gpu.sh OUT [SECTION ...]
#
# OUT: a folder for results, JSON with device, versions, date and commit (COMMIT, where the checkout
# has no .git). Sections, each within ten minutes; all of them if none is named:
#
#     tests     tests with real kernels; WORKERS (default 12), SECONDS_OF_TESTS (300)
#     programs  random programs with real kernels; MINUTES (default 2), SEED (0)
#     digests   what programs end with, beside a CPU's
#     sanitizer compute-sanitizer on the one kernel
#     kernels   the step's kernels beside those of another checkout, OTHER, in one process
#     step      times of one optimizer step; MODEL (default all), ONLY
#     fp8       training steps in FP8 beside torchao's and BF16, 4,096 and 2,048 wide
#     memory    full fine-tuning of a Llama 8B shape: peak memory and tokens per second; ONLY
#     offload   the same with states in host memory
#     learning  losses of a GPT of 100 M parameters; TOKENS (default 50e6), ONLY
#     te        Transformer Engine's own tensors; needs transformer_engine; PARTS of te_check.py
#     ranks     two GPUs: FSDP2, DDP, casts, Transformer Engine's modules, scaling; WORKERS (4)
#     host      times of the host, on a machine that does nothing else
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
mkdir -p "$out"
out=$(realpath "$out")
sections=("$@")
[ $# -gt 0 ] || sections=(
    tests programs digests sanitizer kernels step fp8 memory offload learning te ranks host
)
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export FP4ADAM_COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}
[ -e fp4adam/kernels ] || ln -s ../kernels fp4adam/kernels
gpus=$(nvidia-smi --list-gpus | wc -l)

# Tests with a line each, so that a run that is cut off has the names of those that failed, and
# these once more, with their errors: NAME SECONDS WORKERS [OPTIONS].
tested() {
    local log=$out/$1.log seconds=$2 workers=$3
    shift 3
    timeout "$seconds" python3 -m pytest -v -p no:cacheprovider -n "$workers" "$@" >"$log" 2>&1
    tail -1 "$log"
    grep -c PASSED "$log"
    grep -oE "(FAILED|ERROR) tests/.*" "$log" | sed -E 's/ - .*//; s/ +$//' | sort -u >"$log.failed"
    cat "$log.failed"
    sed -E 's/^(FAILED|ERROR) //' "$log.failed" | head -20 | tr '\n' '\0' |
        timeout 120 xargs -0 -r python3 -m pytest -q --tb=short -n 4 -p no:cacheprovider |
        tail -c 8000
}

tests() { tested tests "${SECONDS_OF_TESTS:-300}" "${WORKERS:-12}"; }

programs() {
    python3 benchmarks/sequences.py --device cuda --path kernels --minutes "${MINUTES:-2}" \
        --seed "${SEED:-0}" --json "$out/sequences${SEED:+_$SEED}.json"
}

digests() {
    python3 benchmarks/digests.py --alone --json "$out/digests_cpu.json" &
    local cpu=$!
    python3 benchmarks/digests.py --device cuda --json "$out/digests_gpu.json"
    wait "$cpu"
    python3 benchmarks/digests.py --compare "$out/digests_cpu.json" "$out/digests_gpu.json"
}

sanitizer() {
    timeout 120 compute-sanitizer --error-exitcode 9 python3 -m pytest -q -n 0 \
        -p no:cacheprovider tests/kernels/test_one_step.py --few | tail -3
}

kernels() {
    if [ -z "${OTHER:-}" ]; then
        echo "not run: kernels needs OTHER, the folder of another checkout"
        return
    fi
    python3 benchmarks/time_kernels.py --other "$OTHER" --out "$out/kernels.json"
}

step() {
    python3 benchmarks/step.py --model "${MODEL:-all}" ${ONLY:+--only "$ONLY"} \
        --json "$out/step.json"
}

fp8() {
    local only="=FusedAdam, BF16 + FP32 masters;quantized matmuls;torchao float8" size
    for size in "5 4096 32" "12 2048 16"; do
        set -- $size
        timeout 290 python3 benchmarks/training.py --compile --times --layers "$1" --dim "$2" \
            --heads "$3" --context 1024 --only "$only" --json "$out/fp8_$2.json"
    done
}

memory() {
    python3 benchmarks/full_finetune.py ${ONLY:+--only "$ONLY"} --json "$out/full_finetune.json"
}

offload() {
    python3 benchmarks/offload.py --exact 3
    python3 benchmarks/offload.py --train 2048 --json "$out/offload.json"
}

learning() {
    python3 benchmarks/numerics.py --tokens "${TOKENS:-50e6}" ${ONLY:+--only "$ONLY"} \
        --out "$out/numerics.json"
}

te() {
    python3 benchmarks/te_check.py ${PARTS:+--parts "$PARTS"} --json "$out/te_check.json"
    python3 benchmarks/step.py --only "TE's tensors" --json "$out/te_step.json"
}

ranks() {
    if [ "$gpus" -lt 2 ]; then
        echo "not run: ranks needs two GPUs, got $gpus"
        return
    fi
    tested ranks "${SECONDS_OF_TESTS:-300}" "${WORKERS:-4}" tests/distributed
    python3 benchmarks/ddp_check.py
    torchrun --nproc-per-node 2 benchmarks/te_fsdp.py --json "$out/te_fsdp.json"
    torchrun --nproc-per-node 2 benchmarks/scaling.py --out "$out/scaling.json"
}

host() { python3 benchmarks/step.py --model small-tensors --json "$out/host.json"; }

for section in "${sections[@]}"; do
    echo "== $section, commit ${FP4ADAM_COMMIT:-unknown}"
    start=$SECONDS
    "$section"
    echo "== $section took $((SECONDS - start)) s"
done

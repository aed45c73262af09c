#!/usr/bin/env bash
# What a change must have passed on an NVIDIA GPU: times of a step before and after it, in turns, the
# tests, and random programs of training calls, one part of them under compute-sanitizer.
#
#     benchmarks/check_gpu.sh OUT [BEFORE]
#
# OUT: a folder for results. BEFORE: a checkout to compare with. With two GPUs, the replicas of DDP
# and the tests of several ranks use both. Takes some 15 minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 before=${2:-}
mkdir -p "$out"
export PYTHONUNBUFFERED=1
link() { [ -e "$1/fp4adam/kernels" ] || ln -s ../kernels "$1/fp4adam/kernels"; }
link .
test_with() { PYTHONPATH=$PWD python3 -m pytest -q -p no:cacheprovider "$@"; }
names='torch AdamW fused, BF16;FP4Adam;FusedAdam, BF16 + FP32'

for turn in 1 2; do
    if [ -n "$before" ]; then
        link "$before"
        (cd "$before" && PYTHONPATH=$PWD python3 benchmarks/step.py --model gpt --only "$names" \
            --json "$out/before$turn.json")
    fi
    PYTHONPATH=$PWD python3 benchmarks/step.py --model gpt --only "$names" \
        --json "$out/after$turn.json"
done

# One line per test, so that a run that is cut off has the names of those that failed.
test_with -n auto -v >"$out/tests.log" 2>&1
tail -1 "$out/tests.log"
grep -E "(FAILED|ERROR) tests/" "$out/tests.log" | sort -u
compute-sanitizer --error-exitcode 9 python3 -m pytest -q -n 0 -p no:cacheprovider \
    tests/optim/test_masters.py -k 'kernels and (new_memory or swapped)' | tail -3
PYTHONPATH=$PWD python3 benchmarks/sequences.py --device cuda --path kernels --minutes 5 \
    --json "$out/sequences.json"
if [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
    PYTHONPATH=$PWD python3 benchmarks/ddp_check.py
fi

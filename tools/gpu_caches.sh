#!/usr/bin/env bash
# Measures what the caching techniques bring, on one GPU: paged attention, prefill batching, prompt caching, quantized
# attention. One repetition, the largest cells; for the kept results run the scenarios without these limits.
#
#   bash tools/gpu_caches.sh [OUTPUT FOLDER]      MODEL=Qwen3-8B PYTHON=python3
#
# CELLS and QUANTIZED replace the options of the two runs: that is how the script is tried on a CPU.
#
# Checks first that nothing changes an answer or leaks, then measures; says how long each part took.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
model="${MODEL:-Qwen3-8B}"
out="${1:-${OUT:-results/runs/caching}}"
export PYTHONPATH=.
mkdir -p "$out"

arkbench() { "$python" -c 'from arkbench.cli import main; main()' "$@"; }

seconds() { echo "== $1: $(($(date +%s) - started)) s"; started=$(date +%s); }

started=$(date +%s)
"$python" -m pytest -q -m gpu tests/gpu/test_caching_gpu.py -p no:cacheprovider || true
seconds "invariants"
arkbench run paged-attention prefill-batching prompt-caching --model "$model" --repetitions 1 \
  ${CELLS:---streams 64 --context 1000} --output "$out/cells"
seconds "paged attention, prefill batching, prompt caching"
arkbench run quantized-attention --model "$model" --repetitions 1 \
  ${QUANTIZED:---streams 64 --context 4000 --output-tokens 64} --output "$out/quantized"
seconds "quantized attention"

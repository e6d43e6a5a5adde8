#!/usr/bin/env bash
# Stages on a machine with several GPUs, within about three minutes: the GPU tests, then short forms of the two
# scenarios. Usage: tools/gpu_stages.sh [STAGES] [OUTPUT FOLDER]; further models by MODELS, LARGE.
# LOOPS and BURSTS replace the options of the runs: that is how the script is tried on a CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
stages="${1:-2}"
out="${2:-results/runs/stages$stages}"
python="${PYTHON:-python3}"
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
status=0

step() {
  local limit="$1"
  shift
  echo "== $*"
  local begin=$SECONDS
  timeout "$limit" "$@" || { echo "== failed with code $?: $*"; status=1; }
  echo "== $((SECONDS - begin)) s"
}

step 100 "$python" -m pytest -q -m gpu tests/gpu/test_stages_gpu.py
for model in ${MODELS:-Llama-3.2-1B Qwen3-8B}; do
  step 60 "$python" -m arkbench.cli run inverted-loops --stages "$stages" --model "$model" --repetitions 1 \
    ${LOOPS:---streams 1,64 --output-tokens 128} --output "$out/inverted-loops-$model"
done
step 90 "$python" -m arkbench.cli run pipelined-prefill --stages "$stages" --model "${LARGE:-Qwen3-32B}" \
  ${BURSTS:---at-once 1,4,16 --prompt-tokens 16000} --repetitions 1 --output "$out/pipelined-prefill"
exit "$status"

#!/usr/bin/env bash
# Tries the regression gate on this machine: head against itself must pass, and a head whose decode steps take 5%
# longer must be a regression. Prints both tables and how long each check took; ends with 0 when both came out so.
#
#   bash tools/gpu_gate.sh [OUTPUT FOLDER]
#
# MODEL (Llama-3.2-1B@layers=4), DEVICE (auto), SHARE (0.05), PYTHON (python3), CHECKS ("same slow"; also "calibrate",
# 22 runs more), RUN_ARGS (the cells). The trees stand in a temporary git repository: this one need not be one.
set -uo pipefail
cd "$(dirname "$0")/.."
python="$(command -v "${PYTHON:-python3}")"
share="${SHARE:-0.05}"
out="$(realpath -m "${1:-${OUT:-results/runs/gate}}")"
cells="${RUN_ARGS:---streams 8 --context 256 --output-tokens 384 --prompt-tokens 1024}"
run_args="--model ${MODEL:-Llama-3.2-1B@layers=4} --device ${DEVICE:-auto} --set kernels=fused --repetitions 1"
run_args="$run_args --no-energy --no-report $cells"
command -v git > /dev/null || { echo "gpu_gate.sh: git is missing; install it" >&2; exit 2; }

repository="$(mktemp -d)"
trap 'rm -rf "$repository"' EXIT
mkdir -p "$out"
cp -r arkbench engine scenarios pyproject.toml "$repository"
find "$repository" -name __pycache__ -prune -exec rm -rf {} +
slow_steps="$PWD/tools/slow_steps.py"
cd "$repository"
export PYTHONPATH="$repository"

commit() {
  git add -A && git -c user.name=gate -c user.email=gate@localhost commit -q --allow-empty -m "$1"
}

git init -q . && printf '__pycache__/\n' > .gitignore && commit base && git tag base || exit 2

status=0
# check NAME WANTED-CODE OPTIONS...
check() {
  local name="$1" wanted="$2" begin=$SECONDS code=0
  shift 2
  echo "== $name"
  "$python" -m arkbench.cli check "$@" --scenario quick --run-args "$run_args" --output "$out/$name" || code=$?
  echo "== $name: code $code, wanted $wanted, $((SECONDS - begin)) s"
  [ "$code" = "$wanted" ] || status=1
}

for name in ${CHECKS:-same slow}; do
  case "$name" in
    same) check same 0 --base base ;;
    slow)
      cp "$slow_steps" engine/slow_steps.py
      printf '\n\nfrom engine.slow_steps import slowed  # noqa: E402\n\nEngine.step = slowed(Engine.step, %s)\n' \
        "$share" >> engine/engine.py
      commit "steps slower by $share"
      check slow 1 --base base
      git reset -q --hard base
      ;;
    calibrate) check calibrate 0 --calibrate --pairs 10 ;;
    *) echo "gpu_gate.sh: CHECKS has '$name'; it takes same, slow, calibrate" >&2; exit 2 ;;
  esac
done
exit "$status"

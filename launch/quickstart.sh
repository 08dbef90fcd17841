#!/usr/bin/env bash
# From a bare Linux machine with Python to a trained model: environment, data, training on two ranks, summary.
#   bash launch/quickstart.sh             CPU, or the GPU where there is one
#   bash launch/quickstart.sh --cpu       CPU in any case (--cuda: GPU in any case)
#   bash launch/quickstart.sh train.epochs=3     further arguments go to launch/train.py
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/env.sh

variant=""
case "${1:-}" in
    --cuda) variant=cuda && shift ;;
    --cpu) variant=cpu && shift ;;
    -h | --help) sed -n '2,5s/^# //p' "$0" && exit 0 ;;
esac
use_env "" "$variant"
# Says what is wrong, and the line that mends it, before anything is trained.
dlrm-autoshard doctor --ranks 2 >"$VENV/doctor.log" 2>&1 || { cat "$VENV/doctor.log"; exit 1; }

dlrm-autoshard data movielens --dir data/movielens-100k
export OMP_NUM_THREADS=1
started=$SECONDS
torchrun --standalone --nproc_per_node=2 launch/train.py --config configs/movielens.yaml "$@"

say ""
python launch/summary.py runs/latest
say "  training    $((SECONDS - started)) s"
say ""
say "Next (after: . $VENV/bin/activate)"
say "  dlrm-autoshard report runs/latest          where each step's time went, rank by rank"
say "  torchrun --nproc_per_node=2 launch/train.py --config configs/synthetic_skewed.yaml"
say "  bash launch/test.sh                        the tests"

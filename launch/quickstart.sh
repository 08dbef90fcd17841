#!/usr/bin/env bash
# From a bare Linux machine with Python to a trained model: environment, data, training on two ranks, summary.
#   bash launch/quickstart.sh             on the GPU if there is one, else on the CPU
#   bash launch/quickstart.sh --cpu       on the CPU (--cuda: on the GPU)
#   bash launch/quickstart.sh train.epochs=3     further arguments go to dlrm-autoshard train
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/env.sh

variant=""
case "${1:-}" in
    --cuda | --gpu) variant=cuda && shift ;;
    --cpu) variant=cpu && shift ;;
    -h | --help) sed -n '2,5s/^# //p' "$0" && exit 0 ;;
    -*) die "quickstart.sh knows --cpu, --cuda (or --gpu) and --help, not '$1'." ;;
esac
use_env "" "$variant"
# Before training, says what is wrong and how to fix it.
dlrm-autoshard doctor --ranks 2 >"$VENV/doctor.log" 2>&1 || { cat "$VENV/doctor.log"; exit 1; }

dlrm-autoshard data movielens --dir data/movielens-100k
started=$SECONDS
dlrm-autoshard train configs/movielens.yaml --ranks 2 "$@"

say ""
python launch/summary.py runs/latest
say "  training    $((SECONDS - started)) s"
say ""
say "Next (after: . $VENV/bin/activate)"
say "  dlrm-autoshard report runs/latest          where each step's time went, rank by rank"
say "  dlrm-autoshard train demo                  half a minute in which the data drift and tables move"
say "  bash launch/test.sh                        the tests"

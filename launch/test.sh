#!/usr/bin/env bash
# Runs ruff, mypy and the tests in the quickstart's environment. Arguments go to pytest:
#   bash launch/test.sh
#   bash launch/test.sh tests/test_plan.py -k moves
#   bash launch/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/env.sh
use_env dev
export OMP_NUM_THREADS=1
use_torchrec

status=0
say "ruff:" && ruff check . && ruff format --check --quiet . || status=1
say "mypy:" && mypy dlrm_autoshard launch tests || status=1
say "pytest:" && pytest --durations=10 --durations-min=1 "$@" || status=1
exit $status

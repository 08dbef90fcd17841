#!/usr/bin/env bash
# Runs ruff, mypy and the tests in the quickstart's environment. Arguments go to pytest:
#   bash launch/test.sh
#   bash launch/test.sh tests/test_decide.py -k move
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
tests() { pytest --durations=10 --durations-min=1 "$@"; }
if [ $# -gt 0 ]; then
    say "pytest:" && tests "$@" || status=1
else # one test file at a time on each core; then the tests that need the whole machine
    say "pytest, on all cores:" && tests -m "not slow and not alone" -n auto --dist loadfile || status=1
    say "pytest, one by one:" && tests -m "alone and not slow" || status=1
fi
exit $status

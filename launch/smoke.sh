#!/usr/bin/env bash
# Runs the quickstart and the most basic tests with another Python, torch and fbgemm than launch/test.sh uses, in an
# environment beside it, .venv-smoke.
#   bash launch/smoke.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/env.sh

# Prints `3.11 2.14` of an environment.
python_and_torch() {
    "$1" -c 'import sys, importlib.metadata as m; print("%d.%d" % sys.version_info[:2], m.version("torch")[:4])'
}

other_python() {
    local candidate minor
    for minor in 13 12 14 11 10; do
        [ "3.$minor" != "$1" ] || continue
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor."*/bin/python; do
            python_works "$candidate" && "$candidate" -c 'import venv, ensurepip' 2>/dev/null && say "$candidate" && return
        done
    done
    say "Python $1 is the only one here." >&2
}

use_env dev
read -r tested_python tested_torch <<<"$(python_and_torch "$PYTHON")"
[ -e "$VENV-smoke" ] || (need_disk cpu "") || { say "Skipped for want of disk."; exit 0; }
DLRM_PYTHON=$(other_python "$tested_python")
DLRM_TORCH=$(grep -oE '"2\.[0-9]+": \(' setup.py | grep -oE '2\.[0-9]+' | grep -vxm 1 "$tested_torch")
export DLRM_PYTHON=${DLRM_PYTHON:-$PYTHON} DLRM_TORCH DLRM_VENV=$VENV-smoke DLRM_AUTOSHARD_TORCHREC=
VENV=$DLRM_VENV

use_env dev cpu
use_torchrec
say "With Python and torch $(python_and_torch "$PYTHON"): the quickstart."
bash launch/quickstart.sh --cpu train.epochs=1 >"$VENV/quickstart.log" 2>&1 || { cat "$VENV/quickstart.log"; exit 1; }
say "pytest:"
export OMP_NUM_THREADS=1
core=()
for name in trainer_reference embeddings rowwise_adagrad bags reshard torchrec_moves checkpoint doctor; do
    core+=("tests/test_$name.py")
done
pytest -m "not slow and not alone" -n auto --dist loadfile "${core[@]}"

# Sourced by quickstart.sh and test.sh, from the repository's root: finds Python, makes .venv, installs once.
#
#   DLRM_PYTHON       the Python to use (3.10 to 3.14); otherwise the first that works
#   DLRM_TORCH        the torch to install, with its matching fbgemm: 2.13 or 2.14; otherwise the newest
#   DLRM_VENV         the environment's folder (.venv)
#   DLRM_TORCH_INDEX  package index for torch, besides pip's own settings; "none": pip's own settings only

VENV=${DLRM_VENV:-.venv}

say() { printf '%s\n' "$*"; }
die() { printf '\n%s\n' "$*" >&2; exit 1; }

# use_env EXTRAS [cpu|cuda]: activates an environment with this package and its extras (`dev` or nothing). Quick if
# nothing has changed.
use_env() {
    local extras=$1 variant
    [ "$(uname -s)" = Linux ] || die "This needs Linux: fbgemm, the embedding kernel, has no packages for $(uname -s)."
    variant=$(wanted_variant "${2:-}")
    [ "$(cat "$VENV/.variant" 2>/dev/null)" = "$variant" ] && python_works "$VENV/bin/python" || make_env "$variant"
    PYTHON=$VENV/bin/python
    install_once "$variant" "$variant${extras:+,$extras}"
    # shellcheck disable=SC1091
    . "$VENV/bin/activate"
}

# Installs TorchRec in a folder of its own, for the tests of its models. Without its requirements, because they include
# fbgemm's CUDA package. TorchRec 1.X goes with torch 2.(X+5), as fbgemm does. 22 MB, once; without it tests skip.
use_torchrec() {
    local minor
    minor=$("$PYTHON" -c 'import importlib.metadata as m; print(int(m.version("torch").split(".")[1]) - 5)')
    export DLRM_AUTOSHARD_TORCHREC=${DLRM_AUTOSHARD_TORCHREC:-$(cd "$VENV" && pwd)/torchrec-1.$minor}
    [ -e "$DLRM_AUTOSHARD_TORCHREC/torchrec" ] && return
    "$PYTHON" -m pip install --disable-pip-version-check -q --retries 1 --no-deps --target "$DLRM_AUTOSHARD_TORCHREC" \
        "torchrec==1.$minor.*" \
        tensordict iopath pyre-extensions portalocker orjson cloudpickle pyvers typing_inspect mypy_extensions \
        >"$VENV/pip-torchrec.log" 2>&1 || say "Could not install torchrec; tests that need it are skipped."
}

# wanted_variant [cpu|cuda]: prints an extra of setup.py, such as cpu or cpu-2.13. Unasked, the environment's stays;
# a new environment takes cuda if there is an NVIDIA GPU.
wanted_variant() {
    local has device
    has=$(cat "$VENV/.variant" 2>/dev/null) || has=$(nvidia-smi -L >/dev/null 2>&1 && say cuda || say cpu)
    device=${1:-${has%%-*}}
    if [ -n "${DLRM_TORCH:-}" ]; then
        grep -q "\"$DLRM_TORCH\": (" setup.py || die "DLRM_TORCH is '$DLRM_TORCH', but setup.py has no fbgemm for it."
        say "$device-$DLRM_TORCH"
    elif [ "$device" = "${has%%-*}" ]; then
        say "$has"
    else
        say "$device"
    fi
}

make_env() {
    if [ -e "$VENV" ] && [ ! -f "$VENV/.variant" ]; then
        die "$VENV exists, but this script did not make it. Move it away, or set DLRM_VENV to another folder."
    fi
    find_python
    say "Making $VENV with $("$PYTHON" --version)."
    rm -rf "$VENV"
    mkdir -p "$VENV"
    say "$1" >"$VENV/.variant"
    "$PYTHON" -m venv "$VENV" || die "Python could not make an environment in $VENV; see its message above."
}

# Whether a Python starts and has the right version, which a shim may not.
python_works() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

find_python() {
    local candidate version without_venv=""
    for candidate in ${DLRM_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python3.14 python}; do
        python_works "$candidate" || continue
        PYTHON=$candidate
        "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1 && return
        without_venv=$candidate
    done
    if [ -n "$without_venv" ]; then
        version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        die "Python $version is here, but without its venv module. Debian, Ubuntu: sudo apt install python$version-venv"
    fi
    [ -z "${DLRM_PYTHON:-}" ] || die "DLRM_PYTHON is '$DLRM_PYTHON', which is no working Python 3.10 to 3.14."
    die "No Python 3.10 to 3.14 found. Install one (Debian, Ubuntu: sudo apt install python3 python3-venv)," \
        "or set DLRM_PYTHON to one."
}

# Installs unless the stamp, of everything the installation depends on, is unchanged.
install_once() {
    local variant=$1 extras=$2 stamp=$VENV/.installed-$2 key index
    key="$(sha256sum setup.py | cut -d ' ' -f 1) $PWD"
    [ "$(cat "$stamp" 2>/dev/null)" != "$key" ] || return 0
    index=$(torch_index "$variant")
    need_disk "$variant" "$index"
    say "Installing torch, fbgemm and this package into $VENV (once; some minutes)."
    # shellcheck disable=SC2086
    pip_install -e ".[$extras]" $index
    say "$key" >"$stamp"
}

pip_install() {
    local log=$VENV/pip.log
    "$PYTHON" -m pip install --disable-pip-version-check "$@" >"$log" 2>&1 && return
    if grep -qi 'no space left' "$log"; then
        die "The disk is full. Free some space and run this again."
    elif grep -qE 'setuptools.*from versions: none|NewConnectionError|NameResolutionError|ConnectTimeout' "$log"; then
        die "pip could not reach a package index. Check the network (http_proxy, or pip's index-url) and run this again."
    fi
    grep -iE '^ *error' "$log" | tail -n 5 >&2 || true
    die "pip could not install the packages; its full output is in $log."
}

# On Linux PyPI's torch brings several GB of CUDA libraries. PyTorch's own index has the CPU build, which pip prefers if
# it sees both. If that index does not answer, pip's own settings decide.
torch_index() {
    local index=${DLRM_TORCH_INDEX:-}
    [ "$index" != none ] || return 0
    if [ -z "$index" ] && [ "${1%%-*}" = cpu ]; then
        index=https://download.pytorch.org/whl/cpu
        "$PYTHON" -c "import urllib.request; urllib.request.urlopen('$index/torch/', timeout=5)" >/dev/null 2>&1 || return 0
    fi
    [ -z "$index" ] || printf -- '--extra-index-url %s' "$index"
}

# 2 GiB with torch's CPU build, 7 with the CUDA libraries of PyPI's build, 12 with those and fbgemm for CUDA.
need_disk() {
    local need_gib=7 free_gib
    if [ "${1%%-*}" = cuda ]; then need_gib=12; elif [ -n "$2" ]; then need_gib=2; fi
    free_gib=$(df -Pk "$VENV" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free_gib" -ge "$need_gib" ] || die "The environment needs about $need_gib GiB of disk, but $VENV has" \
        "$free_gib GiB free. Set DLRM_VENV to a folder on a larger disk."
}

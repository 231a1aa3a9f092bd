# Sourced by the other scripts: makes or reuses an environment and sets PYTHON_BIN to its interpreter.
#
#   make_environment cpu|cuda
#
# cpu has .venv, and cuda, which needs an NVIDIA GPU, has .venv-cuda: their builds of torch differ.
#
# PYTHON            interpreter that makes the environment (default: python3)
# OSTINATO_PYTHON   an interpreter that has everything already. Then no environment is made, and nothing is installed

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# Triton's version for the CPU build of torch. It is no constraint: a CUDA build, such as PyPI's for Linux, needs its own
# version.
TRITON="triton==3.6.0; platform_system == 'Linux'"

fail() {
    echo "error: $1" >&2
    exit 2
}

check_tools() {
    local python="$1"
    command -v "$python" >/dev/null || fail "no '$python' found: install Python 3.10 to 3.13 (Debian, Ubuntu: apt-get install python3 python3-venv), or set PYTHON"
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
        fail "'$python' is $("$python" --version 2>&1); ostinato needs Python 3.10 to 3.13: set PYTHON to one"
    if [ -n "${CXX:-}" ]; then
        command -v "$CXX" >/dev/null || fail "CXX names '$CXX', which does not exist"
    else
        command -v g++ >/dev/null || command -v clang++ >/dev/null ||
            fail "no C++ compiler: an export compiles code. Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++"
    fi
}

# End the script unless there is an NVIDIA GPU. nvidia-smi knows; without it, the driver's device files do.
check_gpu() {
    local looked="no /dev/nvidia0 or the like, and no nvidia-smi"
    if command -v nvidia-smi >/dev/null; then
        looked="'nvidia-smi -L' lists none"
        if [[ "$(nvidia-smi -L 2>/dev/null)" == GPU* ]]; then return; fi
    elif compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
        return
    fi
    fail "this needs an NVIDIA GPU, and there is none ($looked). Nothing was installed"
}

# Let Python keep bytecode in this folder if it is told to write none beside the sources. Packages may have none, and then each
# process would compile all that it imports: 17 s of an export, not 6.
keep_bytecode() {
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        unset PYTHONDONTWRITEBYTECODE
        export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$1}"
    fi
}

# Print the device among a script's options, --device D or --device=D; cpu without one.
device_of() {
    local device=cpu previous= word
    for word in "$@"; do
        [ "$previous" = --device ] && device="$word"
        case "$word" in --device=*) device="${word#--device=}" ;; esac
        previous="$word"
    done
    echo "$device"
}

make_environment() {
    local device="$1" needs
    case "$device" in
    cpu) needs="5 to 10 minutes and 5.5 GB of disk (2.2 GB if pip finds torch built for CPUs)" ;;
    cuda)
        check_gpu
        needs="5 to 10 minutes and about 6 GB of disk"
        ;;
    *) fail "--device takes cpu or cuda, got '$device'" ;;
    esac
    if [ -n "${OSTINATO_PYTHON:-}" ]; then
        check_tools "$OSTINATO_PYTHON"
        PYTHON_BIN="$OSTINATO_PYTHON"
        "$PYTHON_BIN" -c 'import ostinato.delegate' 2>/dev/null ||
            fail "OSTINATO_PYTHON=$OSTINATO_PYTHON cannot import ostinato: pip install . there, or unset it"
        keep_bytecode "${TMPDIR:-/tmp}/ostinato-bytecode-$(id -u)"
        return
    fi
    local python="${PYTHON:-python3}"
    check_tools "$python"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "'$python' has no venv module (Debian, Ubuntu: apt-get install python3-venv)"
    local venv="$ROOT/.venv"
    [ "$device" = cpu ] || venv="$ROOT/.venv-$device"
    local constraints="$ROOT/scripts/constraints-$device.txt"
    local stamp
    stamp="$device $TRITON $(cat "$constraints" "$ROOT/pyproject.toml" | cksum) $ROOT"
    PYTHON_BIN="$venv/bin/python"
    keep_bytecode "$venv/bytecode"
    local version clear=()
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    # Packages of another Python are of no use.
    [ -d "$venv/lib/python$version" ] || clear=(--clear)
    if [ -x "$PYTHON_BIN" ] && [ "$(cat "$venv/.ostinato" 2>/dev/null)" = "$stamp" ]; then
        # An environment stays, whatever `python3` is, unless PYTHON asks for another version.
        [ -n "${PYTHON:-}" ] && [ ${#clear[@]} = 1 ] || return 0
    fi
    echo "== making $venv, once: needs the network, $needs ==" >&2
    echo "== exports then keep compiled headers in ${TMPDIR:-/tmp}: 0.6 GB after e2e.sh ==" >&2
    rm -f "$venv/.ostinato"
    "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv" || fail "'$python -m venv $venv' failed"
    local extras="test,serve"
    [ "$device" = cuda ] && extras="test,serve,cuda,bench"
    # No bytecode at installation: for all files it takes half a minute. Imports write the bytecode that is needed.
    local install=("$PYTHON_BIN" -m pip install --quiet --disable-pip-version-check --no-compile)
    # torch first: a later package that only asks for "torch" must not bring another build of it.
    "${install[@]}" "$(grep '^torch==' "$constraints")" -c "$constraints" || fail "pip could not install torch (see above)"
    local packages=(-e "$ROOT[$extras]")
    [ -d "$venv"/lib/python3.*/site-packages/triton ] || packages+=("$TRITON")
    "${install[@]}" -c "$constraints" "${packages[@]}" ||
        fail "pip could not install ostinato and what it needs (see above)"
    echo "$stamp" >"$venv/.ostinato"
}

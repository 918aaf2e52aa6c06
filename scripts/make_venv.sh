#!/bin/sh
# Build the virtual environment that everything in the Makefile runs in.
#     make_venv.sh PYTHON VENV STAMP REQUIREMENT...
# The first requirement is this package with its extras. STAMP is touched last; its name changes with pyproject.toml and
# constraints.txt, so an up-to-date one means: nothing to do. PIP_EXTRA_INDEX_URL and other settings of pip apply.
set -eu
python=$1 venv=$2 stamp=$3
shift 3

if ! command -v "$python" >/dev/null 2>&1; then
    echo "$python was not found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3 ..." >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "$("$python" --version) is too old: Python 3.10 or newer is needed. Name one: make PYTHON=python3.11 ..." >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "$python cannot make virtual environments: it lacks venv or ensurepip. On Debian and Ubuntu:" >&2
    echo "    sudo apt-get install python$minor-venv" >&2
    exit 1
fi

# A virtual environment keeps absolute paths: one that was moved, or whose Python is gone, is made anew.
if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null ||
    ! "$venv/bin/pip" --version >/dev/null 2>&1; then
    echo "Making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
rm -f "$venv"/.installed-*
echo "Installing $* into $venv (a few minutes the first time)"
"$venv/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt --editable "$@"
touch "$stamp"

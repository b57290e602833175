#!/bin/sh
# Makes the virtual environment of a Cloud TPU VM and installs the package into it: install_tpu.sh VENV. It can be run again.
set -eu
venv=$1

stop() {
    echo "$1" >&2
    exit 1
}

python=
for candidate in python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] ||
    stop "requirements/tpu.txt needs Python 3.11, got $(python3 --version 2>/dev/null || echo "no python3"): install python3.11 and python3.11-venv"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    stop "make tpu-check needs the venv module of Python 3.11, got none: install python3.11-venv"
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ -x "$venv/bin/flash-tf" ] || [ "$free" -ge 4 ] ||
    stop "make tpu-check needs 4 GB of free disk to install, got $free GB in $(pwd)"

log=$(mktemp "${TMPDIR:-/tmp}/flash-tf-install-tpu.XXXXXX")
echo "installing into $venv (500 MB to download, 2 GB on disk; details in $log)"
# The commands are joined by &&: in a group before ||, the shell would not stop at a failure.
{
    { "$venv/bin/python" -c 'import pip' 2>/dev/null || "$python" -m venv --clear "$venv"; } &&
        "$venv/bin/python" -m pip install --no-cache-dir --no-deps --requirement requirements/tpu.txt &&
        "$venv/bin/python" -m pip install --no-cache-dir --no-deps --no-build-isolation --editable .
} >"$log" 2>&1 || {
    why=$(grep -i '^error' "$log" | tail -n 1)
    ! grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError' "$log" ||
        why="the package index does not answer"
    stop "the installation failed: ${why:-it was stopped}; see $log"
}
rm -f "$log"

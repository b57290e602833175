#!/bin/sh
# Makes a virtual environment and installs the package into it: install.sh VENV REQUIREMENT. It can be run again.
set -eu
venv=$1
requirement=$2

stop() {
    echo "$1" >&2
    exit 1
}

python=
for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    found=$(python3 --version 2>/dev/null || echo "no python3")
    stop "flash-tf needs Python 3.11, 3.12 or 3.13, got $found: install python3.12 and python3.12-venv"
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    stop "flash-tf needs the venv module of Python $version, got none: install python$version-venv"
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
[ -x "$venv/bin/flash-tf" ] || [ "$free" -ge 6 ] ||
    stop "flash-tf needs 6 GB of free disk to install, got $free GB in $(pwd)"

log=$(mktemp "${TMPDIR:-/tmp}/flash-tf-install.XXXXXX")
echo "installing into $venv (some minutes; details in $log)"
{
    { "$venv/bin/python" -c 'import pip' 2>/dev/null || "$python" -m venv --clear "$venv"; } &&
        "$venv/bin/python" -m pip install --upgrade pip &&
        "$venv/bin/python" -m pip install --editable "$requirement"
} >"$log" 2>&1 || {
    tail -n 3 "$log" >&2
    stop "the installation failed; see $log"
}
rm -f "$log"

#!/bin/sh
# Runs scripts/tpu_check.py in the environment VENV of install_tpu.sh: tpu_check.sh VENV.
set -eu
venv=$1
log=$(mktemp "${TMPDIR:-/tmp}/flash-tf-tpu-check.XXXXXX")

# Without these variables TensorFlow looks for a TPU and for the metadata service of a TPU VM.
TPU_LOAD_LIBRARY=0 TPU_SKIP_MDS_QUERY=1 KERAS_BACKEND=tensorflow "$venv/bin/python" scripts/tpu_check.py 2>"$log" || {
    echo "tpu-check failed: $(tail -n 1 "$log") (details in $log)" >&2
    exit 1
}
rm -f "$log"

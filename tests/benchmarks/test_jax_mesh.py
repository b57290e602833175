"""The step on JAX, compiled by libtpu for a mesh of TPUs that is not here."""

import subprocess
import sys

import pytest

from benchmarks import result_files
from benchmarks.result_files import ROOT


@pytest.mark.full
def test_a_step_compiles_for_a_v5p_with_a_part_of_the_weights_on_each_chip(tmp_path):
    path = tmp_path / "rows.jsonl"
    meshes = ["--mesh", "data=8", "--mesh", "fsdp=8", "--mesh", "data=4,fsdp=2"]
    command = [sys.executable, "-m", "benchmarks.jax_mesh", "--configs", "quickstart", "--topology", "v5p:2x2x2"]
    command += [*meshes, "--set", "model.remat=true", "--results", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    data, fsdp, both = result_files.read(path)
    whole = 3 * 4 * data["parameters"]
    assert data["state_bytes"] == whole
    assert whole / 8 <= fsdp["state_bytes"] < 1.05 * whole / 8  # only vectors of an odd length are whole
    assert whole / 2 <= both["state_bytes"] < 1.05 * whole / 2
    assert fsdp["hbm_bytes"] < both["hbm_bytes"] < data["hbm_bytes"] < data["hbm_limit_bytes"]
    gradients = 2 * 4 * data["parameters"]  # what a device receives when it adds up float32 gradients
    assert set(data["exchanged_bytes"]) == {"all-reduce"}
    assert gradients <= data["exchanged_bytes"]["all-reduce"] < 1.01 * gradients
    assert fsdp["exchanged_bytes"]["all-gather"] > 0

"""The benchmark of kernels: what is right is timed, what is wrong is not."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from keras import ops

import kernels_xla
from benchmarks import composed, kernels, result_files
from kernels_xla.common import nvidia
from tests.oracles import TIMED

ROOT = Path(__file__).parents[2]
WRONG = """
import dataclasses
from kernels_xla.common.norms import SPEC, scale_norm
SPEC = dataclasses.replace(SPEC, name="wrong", fast=lambda x, g, **case: 1.001 * scale_norm(x, g, **case))
"""
WITH_ANOTHER_FOLDER = """
import sys, kernels_xla
from benchmarks import device, kernels
kernels_xla.__path__.append(sys.argv.pop(1))
for table in (kernels.CASES, kernels.TIMED):
    table["wrong"] = table["norms"]
device.program(kernels.main)
"""


@pytest.mark.full
def test_a_kernel_is_found_checked_and_timed_and_a_wrong_one_is_found_and_not_timed(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    result = tmp_path / "result.jsonl"
    options = ["--kernel", "norms", "wrong", "--tokens", "64", "--lengths", "32", "--results", result]
    command = [sys.executable, "-c", WITH_ANOTHER_FOLDER, tmp_path, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")

    *timed, wrong = result_files.read(result)
    assert [(row["kernel"], row["pass"]) for row in timed] == [("norms", "forward"), ("norms", "forward, backward")]
    for row, passes in zip(timed, (1, 3), strict=True):
        assert row["model_flops"] == passes * kernels_xla.specs()["norms"].flops(row["sizes"], {})
        assert row["model_flops_per_second"] == pytest.approx(row["model_flops"] / row["median_ms"] * 1e3)
        assert row["parity_error"] < kernels.PARITY
    assert wrong["kernel"] == "wrong" and wrong["parity_error"] > kernels.PARITY
    assert not {"median_ms", "model_flops_per_second"} & wrong.keys()
    # All of it is off by a thousandth; which part by most is a matter of the processor's rounding.
    assert re.search(r"wrong +not timed: the (value|gradient of [xg]) at {.*} is off by 1\.0e-03", done.stdout)


def test_a_wrong_gradient_is_a_wrong_kernel():
    spec = kernels_xla.specs()["norms"]
    error, where = kernels.parity(spec, {})
    assert error < kernels.PARITY
    # The value stays; the gradient loses the part that goes through the mean.
    blind = dataclasses.replace(spec, fast=lambda x, g, **case: x * ops.stop_gradient(spec.fast(x, g, **case) / x))
    error, where = kernels.parity(blind, {})
    assert error > kernels.PARITY and where.startswith("the gradient of ")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "flash")) for name in kernels_xla.specs()]
)
def test_every_kernel_passes_the_check_before_its_timing(name):
    error, where = kernels.parity(kernels_xla.specs()[name], kernels.TIMED[name])
    assert error < kernels.PARITY, where


@pytest.mark.parametrize("name", composed.SPECS)
def test_features_and_linear_attention_pass_it_too(name):
    error, where = kernels.parity(composed.SPECS[name], kernels.TIMED[name])
    assert error < kernels.PARITY, where


@pytest.mark.full
def test_a_fused_form_passes_the_check_before_its_timing(interpreted, monkeypatch):
    scan = kernels_xla.specs()["selective_scan"]
    with pytest.raises(ValueError, match="--fused needs an NVIDIA GPU of compute capability"):
        kernels.fused(scan)
    monkeypatch.setattr(nvidia, "capability", lambda: nvidia.HOPPER)
    error, where = kernels._difference(kernels.fused(scan), {}, False)
    assert error < kernels.PARITY, where
    with pytest.raises(ValueError, match="--fused takes selective_scan, gla, retention, got norms"):
        kernels.fused(kernels_xla.specs()["norms"])


def test_a_kernel_is_timed_once_for_each_value_of_an_option():
    spec = kernels_xla.specs()["linear_attention"]
    timed = TIMED[spec.name]
    assert kernels.varied(spec, ["form", "chunks", "matmul"]) == [{**timed, "form": f} for f in ("chunks", "matmul")]
    assert kernels.varied(spec, ["chunk_size", "64"])[0]["chunk_size"] == 64
    assert kernels.varied(spec, None) == [timed]


def test_sizes_have_every_axis_of_every_kernel():
    for spec in (*kernels_xla.specs().values(), *composed.SPECS.values()):
        for sizes in ({**kernels.SIZES, "b": 1, "n": 3, "m": 3}, {**kernels.SMALL, "n": 3}):
            assert kernels.draw(spec, sizes).keys() == spec.inputs.keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernel", "nothing"], "no kernel is called nothing; there are "),
        (["--lengths", "500"], "every length must divide --tokens (65536), got 500"),
        (["--repeats", "1"], "--repeats must be 2 or more, for a median, got 1"),
        (
            ["--kernel", "norms", "--vary", "form", "chunks"],
            "--vary needs an option of the kernel norms and its values, got form chunks",
        ),
    ],
)
def test_bad_input_is_named(arguments, said):
    with pytest.raises(ValueError) as error:
        kernels.main(arguments)
    assert said in str(error.value)

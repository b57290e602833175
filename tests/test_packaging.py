"""What a user gets from a wheel."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flash_tf

ROOT = Path(__file__).parents[1]


@pytest.mark.full
def test_a_wheel_brings_every_config_the_command_the_types_and_the_licence(tmp_path):
    source = tmp_path / "source"  # clean: setuptools would pack what an older build left
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "runs", "*.egg-info"))
    build = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run([sys.executable, *build], check=True)
    (wheel,) = tmp_path.glob("flash_tf-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
        metadata = next(archive.read(name).decode() for name in names if name.endswith("METADATA")).splitlines()
    configs = {f"flash_tf/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs and configs <= names
    assert {"kernels_xla/flash/attention.py", "flash_tf/layers/mixers/flash.py"} <= names
    assert {"flash_tf/py.typed", "kernels_pallas/py.typed", "kernels_xla/py.typed"} <= names
    assert any(name.endswith("LICENSE") for name in names)
    assert not any(name.startswith("tests/") for name in names)
    assert "flash-tf = flash_tf.cli:program" in entry_points
    needed = {Requirement(line.partition(": ")[2]) for line in metadata if line.startswith("Requires-Dist: ")}
    assert {r.name for r in needed if r.marker is None} == {"keras", "numpy", "PyYAML"}
    assert f"Version: {flash_tf.__version__}" in metadata and "License-Expression: Apache-2.0" in metadata


def printed(code):
    """What code prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_answers_without_importing_tensorflow():
    code = (
        "import sys, flash_tf.cli\n"
        "try: flash_tf.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'tensorflow', 'keras', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    assert "fill-mask" in printed(code)


def test_a_command_hides_libraries_from_keras_that_it_does_not_use_and_finds_them_later():
    code = (
        "import sys, flash_tf.cli\n"
        "assert flash_tf.cli.main(['describe', 'quickstart']) == 0\n"
        "with flash_tf.cli._hidden(flash_tf.cli.UNUSED): import flash_tf.training.loop\n"
        "loaded = {'keras', 'tensorflow', *flash_tf.cli.UNUSED} & set(sys.modules)\n"
        "assert loaded == {'keras', 'tensorflow'}, loaded\n"
        "import matplotlib, pandas, scipy, sklearn"
    )
    printed(code)


@pytest.mark.parametrize("path", sorted(ROOT.glob("requirements/*.txt")), ids=lambda path: path.stem)
def test_a_lock_file_pins_packages_of_the_index_alone(path):
    lines = [line.partition("  #")[0] for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines and not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", line)]


def test_no_file_of_the_repository_is_one_that_it_ignores():
    listing = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    listed = shutil.which("git") and subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if not listed or listed.returncode:
        pytest.skip("git does not know this folder")
    assert listed.stdout == ""  # a link to an environment has been there

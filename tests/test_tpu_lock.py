"""The versions that run on a Cloud TPU VM: exact, what docs/tpu.md installs, and within pyproject.toml's ranges."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "tpu.txt"
RENAMED = {"tensorflow": "tensorflow-tpu"}  # the same TensorFlow, built for TPU, under a name of its own


def requirements():
    """The lock's lines, without their comments."""
    lines = [line.partition("#")[0].strip() for line in LOCK.read_text().splitlines()]
    return [Requirement(line) for line in lines if line]


def versions():
    return {canonicalize_name(r.name): Version(str(r.specifier).removeprefix("==")) for r in requirements()}


def section(title):
    """A section of the page on TPUs, without those below its level."""
    return (ROOT / "docs" / "tpu.md").read_text().split(f"\n## {title}\n")[1].split("\n#")[0]


def test_every_line_pins_one_package_to_one_version():
    names = [canonicalize_name(r.name) for r in requirements()]
    assert len(names) == len(set(names)) > 50
    loose = [str(r) for r in requirements() if not re.fullmatch(r"==[0-9][0-9.]*", str(r.specifier)) or r.extras]
    assert loose == []


def test_what_the_package_needs_is_pinned_within_its_ranges():
    pinned = versions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(r) for r in (*project["dependencies"], *project["optional-dependencies"]["tensorflow"])]
    assert len(needed) > 5
    outside = {}
    for requirement in needed:
        name = RENAMED.get(requirement.name, canonicalize_name(requirement.name))
        if name not in pinned or pinned[name] not in requirement.specifier:
            outside[name] = (str(requirement.specifier), pinned.get(name))
    assert outside == {}


def test_tensorflow_is_the_build_for_tpu_and_no_other():
    assert "tensorflow-tpu" in versions()
    assert not {"tensorflow", "tensorflow-cpu", "tf-nightly"} & set(versions())


def test_all_that_is_built_for_one_tensorflow_is_built_for_this_one():
    pinned = versions()
    same = ("tensorflow-tpu", "tensorboard", "tensorflow-text", "tf-keras", "tf-models-official")
    assert {name: pinned[name].release[:2] for name in same} == dict.fromkeys(same, (2, 19))


def test_numpy_protobuf_and_sentencepiece_are_old_enough_for_tensorflow_2_19():
    pinned = versions()
    assert pinned["numpy"] < Version("2.2")
    assert pinned["protobuf"] < Version("6")
    assert pinned["sentencepiece"] < Version("0.2.3")  # its generated code asks for protobuf 7


def test_the_page_installs_the_lock_and_nothing_beside_it():
    installed = re.findall(r"^\$ pip install (.+)$", section("On a Cloud TPU VM"), re.MULTILINE)
    assert installed == ["--no-deps -r requirements/tpu.txt", "--no-deps --no-build-isolation ."]


def test_lock_page_and_installer_name_the_same_python():
    script = (ROOT / "scripts" / "install_tpu.sh").read_text()
    assert "Python 3.11)" in LOCK.read_text().splitlines()[0]
    assert "python3.11 -m venv" in section("On a Cloud TPU VM")
    assert "sys.version_info[:2] != (3, 11)" in script


def test_the_installer_and_the_page_install_alike():
    script = (ROOT / "scripts" / "install_tpu.sh").read_text()
    assert "--no-deps --requirement requirements/tpu.txt" in script
    assert "--no-deps --no-build-isolation --editable ." in script

"""The list of systems: every one that the papers have, and what is said of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flash_tf import cli, config, systems

ROOT = Path(__file__).parents[1]
NAMES = {
    *("transformer", "transformer_plus", "transformer_plus_plus", "flash_quad", "flash", "performer"),
    *("performer_matmul", "combiner_axial", "combiner_fixed", "mc_tfm_pp", "local_only", "global_only"),
    *("first_to_all", "transnormer_t1", "transnormer_t2", "one_plus_elu", "cosformer", "linear_gpt2", "gpt2", "gla"),
    *("retnet", "mamba", "llama", "kernelized", "nystromformer", "linformer", "informer", "reformer", "bigbird"),
    *("skyformer", "transformer_ls", "flash_weighted", "performer_favor"),
}


@pytest.fixture(scope="module")
def found():
    return {one["name"]: one for one in systems.systems()}


def test_every_system_of_the_papers_is_there_with_its_paper(found):
    assert NAMES <= found.keys()
    assert all(one["paper"] for one in found.values())


def test_a_system_is_causal_exactly_where_it_has_a_causal_config(found):
    for name, one in found.items():
        assert one["causal"] == (f"wikitext2_lm/{name}" in config.names())
        assert one["config"] in config.names()


def test_states_and_complexities_are_those_of_the_formulas(found):
    said = {name: (one["state"], one["complexity"]) for name, one in found.items()}
    assert said["flash"] == said["retnet"] == said["mamba"] == said["transnormer_t2"] == ("constant", "n")
    assert said["flash_quad"] == said["gpt2"] == ("cache", "n^2")
    assert said["combiner_axial"][0] == "cache"
    assert said["nystromformer"] == said["linformer"] == ("none", "n")
    assert said["kernelized"] == ("none", "n^2")


def test_the_command_prints_one_object_and_a_table(capsys):
    assert cli.main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    keys = ["name", "config", "paper", "causal", "state", "complexity"]
    assert [list(one) for one in listed["systems"]] == [keys] * len(listed["systems"])
    assert {"mixers", "models", "configs"} <= listed.keys()


def test_a_reader_that_has_seen_enough_ends_the_command_without_a_word(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as out, open(tmp_path / "errors", "wb+") as errors:
        done = subprocess.run([sys.executable, "-m", "flash_tf.cli", "list"], stdout=out, stderr=errors, cwd=ROOT)
        errors.seek(0)
        assert (done.returncode, errors.read()) == (128 + signal.SIGPIPE, b"")

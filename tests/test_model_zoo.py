"""The list of systems: every one that the papers have, and what is said of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flash_tf import cli, config, model_zoo

ROOT = Path(__file__).parents[1]
EVERY_PAIR = (True, "cache", "n^2")  # keys and values of all tokens
ONE_SUM = (True, "constant", "n")  # of all tokens, or of finished chunks beside the open one
# A summary of each token or chunk, kept and read by all later ones: n / c a token, for chunks of a fixed c.
SUMMARIES = (True, "cache", "n^2")
FEW_FOR_ALL = (False, "none", "n")  # as many landmarks, blocks or buckets for any text
ROWS_OVER_ALL = (False, "none", "n^2")
SAID = {
    **dict.fromkeys(("transformer", "transformer_plus", "transformer_plus_plus", "gpt2", "llama"), EVERY_PAIR),
    "flash_quad": EVERY_PAIR,
    **dict.fromkeys(("flash", "flash_overlapping", "local_only", "global_only", "mc_tfm_pp"), ONE_SUM),
    **dict.fromkeys(("performer", "performer_favor", "one_plus_elu", "cosformer", "linear_gpt2"), ONE_SUM),
    "performer_matmul": (True, "constant", "n^2"),  # a triangle over all tokens makes the sums
    **dict.fromkeys(("transnormer_t1", "transnormer_t2", "retnet", "mamba"), ONE_SUM),
    **dict.fromkeys(("gla", "gla_both", "gla_value", "gla_none"), ONE_SUM),
    **dict.fromkeys(("combiner_axial", "combiner_fixed", "flash_weighted", "transformer_ls"), SUMMARIES),
    **dict.fromkeys(("linformer", "nystromformer", "skyformer", "informer", "reformer", "bigbird"), FEW_FOR_ALL),
    "norm_attention": (False, "none", "n"),
    "kernelized": ROWS_OVER_ALL,
    "first_to_all": ROWS_OVER_ALL,  # n / c rows of n
}


@pytest.fixture(scope="module")
def found():
    return {one["name"]: one for one in model_zoo.systems()}


def test_every_system_has_its_paper(found):
    assert all(one["paper"] for one in found.values())


def test_a_system_is_causal_exactly_where_it_has_a_causal_config(found):
    for name, one in found.items():
        assert one["causal"] == (f"wikitext2_lm/{name}" in config.names())
        assert one["config"] in config.names()


def test_what_is_said_of_a_system_is_what_its_paper_says(found):
    fields = ("causal", "state", "complexity")
    assert {name: tuple(found[name][field] for field in fields) for name in SAID} == SAID


def test_the_command_prints_one_object_and_a_table(capsys):
    assert cli.main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    keys = ["name", "config", "paper", "causal", "state", "complexity"]
    assert [list(one) for one in listed["systems"]] == [keys] * len(listed["systems"])
    assert {"mixers", "models", "configs"} <= listed.keys()


@pytest.mark.full
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_word(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as out, open(tmp_path / "errors", "wb+") as errors:
        done = subprocess.run([sys.executable, "-m", "flash_tf.cli", "list"], stdout=out, stderr=errors, cwd=ROOT)
        errors.seek(0)
        assert (done.returncode, errors.read()) == (128 + signal.SIGPIPE, b"")

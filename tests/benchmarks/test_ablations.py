"""TransNormer's ablations at a small size: which models, and what they share."""

import argparse

import pytest

from benchmarks import ablations
from flash_tf import config


def given(**options):
    return argparse.Namespace(**{"text": "wikitext-2", "out": "out", "seed": 0, "steps": 600, "set": [], **options})


def test_every_ablation_follows_the_model_that_it_changes_and_the_papers_perplexity_is_read():
    names = ablations.systems()
    assert len(names) == len({*names}) == 29
    found = [[name for name in names if ablations._asked(name, [base])] for base in ablations.BASES]
    assert [len(one) for one in found] == [5, 12, 12] and sorted(sum(found, [])) == sorted(names)
    for name in names:
        if name.startswith(ablations.FOLDER):
            assert names.index(ablations.base(name)) < names.index(name)
    assert [ablations.paper(name)[1] for name in names].count(None) == 3  # the models that are changed
    assert ablations.paper("transnormer_ablations/t2_diag_3_norm_9") == ("8", 3.83)


@pytest.mark.parametrize("name", ablations.systems())
def test_all_have_one_size_text_and_order(name):
    run = ablations.training(name, given(), "out/first")
    loaded = config.load(run.config, run.overrides)
    assert (loaded.model["width"], loaded.model["depth"], loaded.train.steps) == (192, 12, 600)
    assert loaded.data.source["train"] == "wikitext-2/train.txt" and loaded.data.tokenizer == "out/first"
    assert loaded.batch_size == 64


def test_the_table_has_the_papers_figure_beside_ours():
    row = {"device": "a GPU", "config": "transnormer_ablations/t1_mlp", "steps": 600, "seed": 0, "perplexity": 50.0}
    text = ablations.as_text([{**row, "perplexity": 60.0, "parameters": 1}, {**row, "parameters": 1_500_000}])
    assert text.splitlines()[0] == "a GPU, 600 steps, seed 0"
    assert text.splitlines()[2].split() == ["t1_mlp", "10", "50.0", "3.93", "1,500,000"]

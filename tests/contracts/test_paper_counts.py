"""The parameters of the papers' tables, and of the configs that are their rows."""

import fnmatch
import json
import re
from pathlib import Path

import numpy as np
import pytest

from flash_tf import config, model_stats
from flash_tf.training import modelling
from tests import tiers

TABLES = json.loads(Path(__file__).parent.with_name("paper_tables.json").read_text("utf-8"))
ROWS = {row["config"]: row for row in TABLES["rows"]}
ONE_OF_EACH_PAPER = ("mlm_c4/flash", "wikitext103_lm/transnormer_t2", "slimpajama_lm/gla_1.3b")
FIELDS = {"config", "paper", "printed", "digits", "differs", "counted", "sum", "beside", "why"}


def parameters(name):
    with model_stats.without_weights():
        model = modelling.make_model(modelling.with_masking(config.load(name)))
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def rounds_to(count, said, digits=None):
    """Whether a count is what is said in millions, all of whose digits count unless it is said how many do."""
    digits = digits or len(said.replace(".", ""))
    return float(f"{count / 1e6:.{digits}g}") == float(said)


def total(terms):
    """What a sum of products of whole numbers comes to."""
    assert re.fullmatch(r"[0-9+*() ]+", terms)
    return eval(terms)


@pytest.mark.parametrize("name", tiers.thinned(list(ROWS), *ONE_OF_EACH_PAPER))
def test_the_parameter_count_is_that_of_the_papers_row(name):
    row, found = ROWS[name], parameters(name)
    if "printed" in row:
        agrees = rounds_to(found + row.get("beside", 0), row["printed"], row.get("digits"))
        assert agrees == ("differs" not in row)
    if "counted" in row:
        assert rounds_to(found, row["counted"])
    if "sum" in row:
        assert found == total(row["sum"])


def test_every_row_says_what_is_counted():
    assert len(ROWS) == len(TABLES["rows"])
    for row in ROWS.values():
        assert row.keys() <= FIELDS and row["paper"]
        assert {"counted", "sum"} & row.keys() or ("printed" in row and "differs" not in row)
        assert bool(row.get("why")) == ("beside" in row)
        assert {"digits", "differs", "beside"}.isdisjoint(row) or "printed" in row


def test_every_config_has_a_row_or_a_reason_why_it_has_none():
    names, without = set(config.names()), set()
    for one in TABLES["without_a_row"]:
        found = fnmatch.filter(names, one["configs"])
        assert found and one["why"], one
        without.update(found)
    assert without.isdisjoint(ROWS)
    assert without | ROWS.keys() == names

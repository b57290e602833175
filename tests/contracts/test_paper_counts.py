"""The parameters of the papers' tables, and of the configs that are their rows."""

import json
from pathlib import Path

import numpy as np
import pytest

from flash_tf import config, describing
from flash_tf.training import build

TABLES = json.loads(Path(__file__).parent.with_name("paper_tables.json").read_text("utf-8"))
ROWS = {row["config"]: row for row in TABLES["rows"]}
TASKS = {"mlm_c4", "lm_wiki40b", "lm_pg19", "wikitext103_lm", "wikitext103_mlm", "c4_lm"}
TASKS |= {"flash_figure3_lm", "flash_figure3_mlm"}


def parameters(name):
    with describing.without_weights():
        model = build.make_model(build.with_masking(config.load(name)))
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


@pytest.mark.parametrize("name", ROWS)
def test_the_parameter_count_is_that_of_the_papers_row(name):
    row, found = ROWS[name], parameters(name)
    for digits, beside in ((row.get("printed"), row.get("beside", 0)), (row.get("counted"), 0)):
        if digits is not None:
            decimals = len(str(digits).partition(".")[2])
            assert round((found + beside) / 1e6, decimals) == float(digits)


def test_every_row_says_what_is_counted():
    assert len(ROWS) == len(TABLES["rows"])
    assert all("printed" in row or "counted" in row for row in ROWS.values())
    assert all(row["why"] for row in [*TABLES["not_derivable"], *(row for row in ROWS.values() if "beside" in row)])


def test_every_config_of_a_task_of_the_papers_has_a_row():
    assert {name for name in config.names() if name.split("/")[0] in TASKS} <= ROWS.keys()

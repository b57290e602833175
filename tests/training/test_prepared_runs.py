"""Runs on prepared text."""

import numpy as np
import pytest

from flash_tf import config
from flash_tf.preparing.prepare import prepare
from flash_tf.training import loop
from tests.preparing.test_prepare import Here
from tests.training import runs


def prepared(folder, **sections) -> str:
    """A config on text that is prepared in `folder/prepared`."""
    runs.corpus(folder)
    prepare(config.load(runs.write(folder, **sections)), f"{folder}/prepared", runs.Lines(), Here())
    source = {"type": "prepared", "path": f"{folder}/prepared"}
    return runs.write(folder, **{**sections, "data": {**sections.get("data", {}), "source": source}})


@pytest.mark.parametrize("packing", ["documents", pytest.param("concatenate", marks=pytest.mark.full)])
def test_a_run_that_stops_ends_in_the_bits_of_one_that_does_not(tmp_path, packing):
    path = prepared(tmp_path, model={"type": "causal_lm", "dropout": 0.1, "depth": 1}, data={"packing": packing})
    runs.train(path, tmp_path / "whole")
    runs.train(path, tmp_path / "halves", stop_after=4)
    assert len(runs.losses(tmp_path / "halves")) == 4
    assert "going on from step 4" in runs.train(path, tmp_path / "halves")
    runs.same(tmp_path / "whole", tmp_path / "halves")
    assert not (tmp_path / "whole" / "tokens").exists()
    evaluated = runs.records(tmp_path / "whole", "evaluations.jsonl")[-1]
    assert evaluated["tokens"] > 400 and np.isfinite(evaluated["loss"])


def test_prepared_text_that_does_not_fit_a_run_is_refused_before_any_work(tmp_path):
    path = prepared(tmp_path)
    for override, message in {
        "data.sequence_length=16": "was prepared with sequence_length 32, and this config needs 16",
        "data.packing=documents": "was prepared with kind concatenate, and this config needs documents",
        "model.type=causal_lm": "was prepared with overlap 0, and this config needs 1",
        f"data.source.path={tmp_path}": "has no prepared.json, which `flash-tf prepare` writes",
        "model.vocabulary_size=300": "has 100 pieces",
    }.items():
        with pytest.raises(ValueError, match=message):
            loop.train(config.load(path, [override]), f"{tmp_path}/run", runs.Lines())
    gone = tmp_path / "prepared" / "train" / "0000001-00000.windows"
    gone.unlink()
    with pytest.raises(ValueError, match=rf"{gone} is missing, and prepared.json names it"):
        loop.train(config.load(path), f"{tmp_path}/run", runs.Lines())
    assert not (tmp_path / "run" / "config.yaml").exists()

"""Model cards of presets, and tokenizers that come along."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import flash_tf as ft
from flash_tf.cli import main
from flash_tf.converting import card
from flash_tf.converting.convert import from_public, save_public
from flash_tf.data import tokenizers
from tests.converting.test_bad_input import changed

RUN = Path(__file__).parents[1] / "old_files" / "run"
PIECES = [chr(i) for i in range(0x4E00, 0x4E00 + 60)]
pytestmark = pytest.mark.one_backend


def with_words(folder, count):
    """Writes a tokenizer of `count` words into a folder."""
    words = ["<pad>", "<unk>", "</s>", "<mask>", "<cls>", *(f"w{i}" for i in range(count - 5))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_that_is_read_here_comes_along_both_ways(tmp_path):
    source = changed(tmp_path)
    with_words(source, 61)
    assert main(["convert", str(source), str(tmp_path / "preset")]) == 0
    assert main(["convert", str(tmp_path / "preset"), str(tmp_path / "back"), "--to", "safetensors"]) == 0
    assert ft.load(tmp_path / "preset").tokenize(["w3 w0"])[0].tolist() == [8, 5]
    for folder in ("preset", "back"):
        assert json.loads((tmp_path / folder / "tokenizer.json").read_text())["model"]["vocab"]["w3"] == 8
    said = json.loads((tmp_path / "back/tokenizer_config.json").read_text())
    special = {"bos": "<unk>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}  # bos is 1, as it was
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {name: said[f"{name}_token"] for name in special} == special


def test_a_model_of_ours_says_its_special_ids_to_the_public_library(tmp_path):
    model = from_public(str(changed(tmp_path)))
    with_words(tmp_path, 61)
    model.tokenizer = tokenizers.load(str(tmp_path / "tokenizer.json"), 61)
    save_public(model, str(tmp_path / "out"), {}, {})
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert [said[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [2, 2, 0]


def test_a_tokenizer_with_ids_outside_the_vocabulary_stays_behind_with_a_line(tmp_path, capfd):
    source = changed(tmp_path)
    with_words(source, 70)
    assert main(["convert", str(source), str(tmp_path / "preset")]) == 0
    assert f"gets weights alone: {source} has no tokenizer that is read here" in capfd.readouterr().err
    assert ft.load(tmp_path / "preset").tokenizer is None


def test_the_card_of_a_run_says_data_licence_and_the_metrics_of_its_step(tmp_path, capfd):
    shutil.copytree(RUN, tmp_path / "run")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "first"), "--licence", "cc0-1.0"]) == 0
    assert "licence" not in capfd.readouterr().err
    card = (tmp_path / "first" / "README.md").read_text()
    step = next(int(line.split("|")[2]) for line in card.splitlines() if line.startswith("| steps"))
    rows = [{"step": step - 1, "perplexity": 9.0}, {"step": step, "perplexity": 7.25, "words": 3}]
    (tmp_path / "run" / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "preset")]) == 0
    card = (tmp_path / "preset" / "README.md").read_text()
    assert "licence is unknown" in capfd.readouterr().err and 'license: "unknown"' in card
    assert "| validation perplexity | 7.2500 |" in card and "9.0" not in card
    assert "| data |" in card and '"type"' in card
    one, other = (ft.load(tmp_path / name) for name in ("run", "preset"))
    ids = np.arange(12, dtype="int32")[None]
    assert np.array_equal(np.asarray(one(ids)), np.asarray(other(ids)))
    assert one.tokenizer.fingerprint == other.tokenizer.fingerprint


def test_the_licence_of_a_card_is_handed_on(tmp_path, capfd):
    source = changed(tmp_path)
    (source / "README.md").write_text("---\nlanguage: en\nlicense: 'apache-2.0'\n---\n# A model\n\nlicense: other\n")
    assert main(["convert", str(source), str(tmp_path / "preset")]) == 0
    capfd.readouterr()
    assert main(["convert", str(tmp_path / "preset"), str(tmp_path / "back"), "--to", "safetensors", "--json"]) == 0
    said = {"model": "LlamaForCausalLM", "library": "transformers", "licence": "apache-2.0", "tokenizer": False}
    assert json.loads(capfd.readouterr().out) == {"out": str(tmp_path / "back"), **said}
    assert 'license: "apache-2.0"' in (tmp_path / "back" / "README.md").read_text()


@pytest.mark.parametrize(
    ("line", "licence"),
    [
        ("license: mit  # of the weights", "mit"),
        ("license:\n- mit\n- apache-2.0", "mit, apache-2.0"),
        ("license:\ntags: [x]", "unknown"),
        ("license: [", "unknown"),
    ],
)
def test_a_licence_is_read_as_yaml(tmp_path, line, licence):
    (tmp_path / "README.md").write_text(f"---\n{line}\n---\n# A model\n")
    assert card.read_licence(str(tmp_path)) == licence


def test_a_licence_stays_as_it_is_however_often_it_is_handed_on(tmp_path):
    licence, model = 'CC © Müller "x" \\', from_public(str(changed(tmp_path)))
    for _ in range(3):
        (tmp_path / "README.md").write_text(card.card(model, "Made up.", licence, {}))
        assert card.read_licence(str(tmp_path)) == licence


def test_a_run_whose_last_evaluation_is_cut_is_converted(tmp_path):
    shutil.copytree(RUN, tmp_path / "run")
    with (tmp_path / "run/evaluations.jsonl").open("a") as file:
        file.write('[1]\n{"step": 6, "lo')
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "preset")]) == 0


def test_special_ids_that_a_public_tokenizer_lacks_are_no_tokens_of_it(tmp_path):
    source = changed(tmp_path)
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(["<|endoftext|>", *PIECES])}, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    assert main(["convert", str(source), str(tmp_path / "preset")]) == 0
    assert ft.load(tmp_path / "preset").tokenizer.lost
    assert main(["convert", str(tmp_path / "preset"), str(tmp_path / "back"), "--to", "safetensors"]) == 0
    settings = json.loads((tmp_path / "back/tokenizer_config.json").read_text())
    known = json.loads((tmp_path / "back/tokenizer.json").read_text())["model"]["vocab"]
    assert {value for name, value in settings.items() if name.endswith("_token")} <= known.keys()
    said = json.loads((tmp_path / "back/config.json").read_text())
    assert said.get("pad_token_id") == json.loads((source / "config.json").read_text()).get("pad_token_id")

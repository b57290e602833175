"""Configs that say how they differ from another, and the numbers in them."""

import pytest

from flash_tf import config, config_merge, strict_yaml
from flash_tf.models.causal_lm import CausalLM
from flash_tf.training import modelling


def written(tmp_path, name, text):
    path = tmp_path / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_config_with_a_base_is_the_base_but_for_what_it_says(tmp_path):
    path = written(tmp_path, "wide", "base: wikitext2_lm/flash\nmodel: {width: 256}\ntrain: {steps: 7}\n")
    base, wide = config.load("wikitext2_lm/flash"), config.load(path)
    changed = config_merge.differences(config.to_mapping(base), config.to_mapping(wide))
    assert changed == [("model.width", base.model["width"], 256), ("train.steps", base.train.steps, 7)]


def test_a_part_with_a_type_of_its_own_takes_no_option_of_the_bases(tmp_path):
    path = written(tmp_path, "quad", "base: wikitext2_lm/flash\nmodel: {mixer: {type: gau, key_dim: 8}}\n")
    assert config.load(path).model["mixer"] == {"type": "gau", "key_dim": 8}


def test_a_section_with_a_type_of_its_own_keeps_the_options_of_the_bases(tmp_path):
    path = written(tmp_path, "causal", "base: quickstart\nmodel: {type: causal_lm}\n")
    base, causal = config.load("quickstart"), config.load(path)
    changed = config_merge.differences(config.to_mapping(base), config.to_mapping(causal))
    assert changed == [("model.type", "masked_lm", "causal_lm")]
    assert isinstance(modelling.make_model(causal), CausalLM)


def test_a_base_may_have_a_base_and_the_command_line_comes_last(tmp_path):
    first = written(tmp_path, "first", "base: wikitext2_lm/flash\ntrain: {steps: 7}\nmodel: {width: 64}\n")
    second = written(tmp_path, "second", f"base: {first}\ntrain: {{steps: 8}}\n")
    loaded = config.load(second, ["train.steps=9"])
    assert (loaded.train.steps, loaded.model["width"]) == (9, 64)


@pytest.mark.parametrize("task", ["wikitext2_lm", "c4_lm"])
def test_linear_gpt2_is_gpt2_but_for_its_mixer_and_its_paper(task):
    before, after = (config.to_mapping(config.load(f"{task}/{name}")) for name in ("gpt2", "linear_gpt2"))
    changed = {name: values for name, *values in config_merge.differences(before, after)}
    assert changed.pop("model.mixer.type") == ["self_attention", "linear_attention"]
    assert changed.pop("model.mixer.features") == [None, "softplus"]
    assert changed.keys() <= {"paper"}


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("base: wikitext2_lm/flahs\n", "no config file 'wikitext2_lm/flahs'.* did you mean 'wikitext2_lm/flash'"),
        ("base: [a]\n", r"base must be the name of a config, got \['a'\]"),
        ("base: wikitext2_lm/flash\ntrian: {steps: 3}\n", "has no option 'trian'; did you mean 'train'"),
    ],
)
def test_a_bad_base_is_said_in_a_line(tmp_path, text, needed):
    path = written(tmp_path, "bad", text)
    with pytest.raises(ValueError, match=needed) as error:
        config.load(path)
    assert "\n" not in str(error.value)


def test_a_base_that_leads_back_is_refused(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(f"base: {second}\n", encoding="utf-8")
    second.write_text(f"base: {first}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="its base leads back to this file"):
        config.load(str(first))


@pytest.mark.parametrize(("text", "number"), [("3e-4", 3e-4), ("1E3", 1e3), (".5e-1", 0.05), ("2.e+1", 20.0), ("7", 7)])
def test_a_number_may_have_an_exponent_without_a_dot(text, number):
    assert config.load("quickstart", [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == number


def test_what_only_looks_like_a_number_stays_text():
    for text in ("1:30", "010", "e5", "1e", "1e5x", "2026-11-24"):
        assert strict_yaml.load(text, "here") == text

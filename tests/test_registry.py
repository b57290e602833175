"""What is said of a wrong name, option, value or config: what, what was needed, what came."""

from typing import Any, Literal

import pytest

from flash_tf import config
from flash_tf.config import Config
from flash_tf.layers.mixers import MIXERS
from flash_tf.registry import Registry, check_options, fits, spell

YAML = """
model: {type: masked_lm, vocabulary_size: 500, width: 64, depth: 2, mixer: {type: flash}}
data: {source: {type: python_stdlib}, sequence_length: 64}
train: {tokens_per_step: 256}
"""


class Part:
    """Takes an option of every kind."""

    def __init__(
        self,
        size: int,
        rate: float = 0.1,
        flag: bool = False,
        name: str | None = None,
        kind: Literal["a", "b"] = "a",
        betas: tuple[float, float] = (0.9, 0.99),
        words: list[str] | None = None,
        whatever: Any = None,
        divisor: str | int = "x",
    ):
        pass


def refuses(message, function, *arguments, **options):
    """Asserts that the whole message is this one."""
    with pytest.raises(ValueError) as error:
        function(*arguments, **options)
    assert str(error.value) == message


@pytest.mark.parametrize(("options", "message"), [
    ({"size": 1, "raet": 2.0}, "part 'p' has no option 'raet'; did you mean 'rate'?"),
    ({"size": 1, "zzz": 2}, "part 'p' has no option 'zzz'"),
    ({}, "part 'p' needs size"),
    ({"size": "3"}, "part 'p': size must be int, got '3' (str)"),
    ({"size": True}, "part 'p': size must be int, got True (bool)"),
    ({"size": 1.0}, "part 'p': size must be int, got 1.0 (float)"),
    ({"size": None}, "part 'p': size must be int, got None (NoneType)"),
    ({"size": 1, "rate": True}, "part 'p': rate must be float, got True (bool)"),
    ({"size": 1, "flag": 1}, "part 'p': flag must be bool, got 1 (int)"),
    ({"size": 1, "name": 3}, "part 'p': name must be str or null, got 3 (int)"),
    ({"size": 1, "kind": "c"}, "part 'p': kind must be one of 'a', 'b', got 'c' (str)"),
    ({"size": 1, "divisor": 0.5}, "part 'p': divisor must be str or int, got 0.5 (float)"),
])  # fmt: skip
def test_a_wrong_option_is_named_with_what_was_needed_and_what_came(options, message):
    refuses(message, check_options, Part, options, where="part 'p'")


@pytest.mark.parametrize(("name", "value"), [("betas", [0.9, "0.99"]), ("betas", [0.9, True]), ("words", ["a", 1])])
def test_elements_of_a_list_are_checked(name, value):
    with pytest.raises(ValueError, match=f"^part 'p': {name} must be .*got "):
        check_options(Part, {"size": 1, name: value}, where="part 'p'")


def test_right_options_pass():
    options = {"size": 3, "rate": 1, "flag": True, "name": None, "kind": "b", "betas": [0.5, 1], "words": ["a"]}
    check_options(Part, {**options, "whatever": object(), "divisor": 2}, where="part 'p'")


def test_an_int_is_a_float_and_a_bool_is_no_number():
    assert fits(1, float) and fits(1, int) and fits(True, bool)
    assert not (fits(True, int) or fits(True, float) or fits(1.5, int) or fits(1, bool))
    assert spell(int | None) == "int or null"


def test_an_unknown_part_is_answered_with_the_nearest_name_and_all_names():
    known = ", ".join(MIXERS.names())
    refuses(f"no mixer is called 'linformr'; did you mean 'linformer'? There are: {known}", MIXERS.get, "linformr")
    refuses(f"no mixer is called 'zzz'. There are: {known}", MIXERS.get, "zzz")


def test_a_part_needs_a_mapping_with_a_type():
    refuses("a mixer needs a mapping with a `type`, got 'gau'", MIXERS.build, "gau")
    refuses("a mixer needs a mapping with a `type`, got {'heads': 2}", MIXERS.build, {"heads": 2})


def test_a_part_with_a_wrong_option_is_refused_before_it_is_built():
    message = "mixer 'gau' has no option 'key_dims'; did you mean 'key_dim'?"
    refuses(message, MIXERS.build, {"type": "gau", "key_dims": 3})


def test_building_takes_options_of_the_caller_beside_those_of_the_file():
    layer = MIXERS.build({"type": "gau", "key_dim": 8}, causal=True, name="mixer", dtype="bfloat16")
    assert (layer.key_dim, layer.causal, layer.name, layer.compute_dtype) == (8, True, "mixer", "bfloat16")


def test_one_name_is_given_once():
    registry = Registry("thing", folder="flash_tf.layers.mixers")
    registry.register("part")(Part)
    with pytest.raises(ValueError, match="^two things are called 'part': "):
        registry.register("part")(int)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(YAML)
    return str(path)


def test_a_config_is_read_with_the_batch_that_its_tokens_make(path):
    loaded = config.load(path)
    assert isinstance(loaded, Config) and loaded.batch_size == 4
    assert config.load(path, ["data.sequence_length=32"]).batch_size == 8


@pytest.mark.parametrize(("override", "message"), [
    ("data.sequence_length", "--set needs key=value, got 'data.sequence_length'"),
    ("data.sequence_length=100", "train.tokens_per_step (256) must be a multiple of data.sequence_length (100)"
                                 " x train.accumulate (1)"),
    ("train.accumulate=3", "train.tokens_per_step (256) must be a multiple of data.sequence_length (64)"
                           " x train.accumulate (3)"),
    ("data.sequence_length=0", "data.sequence_length must be positive, got 0"),
    ("data.sequence_length.more=1", "--set data.sequence_length.more=1: sequence_length is not a mapping"),
    ("data.sequence_length=[", "--set data.sequence_length=[: the value is not YAML: while parsing a flow node "
                               "expected the node content, but found '<stream end>', line 1, column 2"),
    ("optimizer.betas=[0.9]", "optimizer.betas must be two numbers in [0, 1), got [0.9]"),
    ("masking.rate=1.5", "masking.rate must be between 0 and 1, got 1.5"),
    ("optimizer.clip={scope: global, norm: -1}", "optimizer.clip.norm must be positive, got -1"),
])  # fmt: skip
def test_a_wrong_override_is_refused_with_the_reason(path, override, message):
    with pytest.raises(ValueError) as error:
        config.load(path, [override])
    assert str(error.value) in (message, f"{path}: {message}")


@pytest.mark.parametrize(("override", "message"), [
    ("train.steps=1e3", "train: steps must be int, got 1000.0 (float)"),
    ("trian.steps=3", " has no option 'trian'; did you mean 'train'?"),
    ("train.stpes=3", "train has no option 'stpes'; did you mean 'steps'?"),
    ("optimizer.clip={scope: global, norms: 1}", "optimizer: clip has no option 'norms'; did you mean 'norm'?"),
    ("optimizer.clip={scope: global}", "optimizer: clip needs norm"),
    ("optimizer.clip.scope=everywhere", "optimizer: clip: scope must be one of 'replica', 'global',"
                                        " 'layer', got 'everywhere' (str)"),
    ("train.steps=true", "train: steps must be int, got True (bool)"),
    ("train.steps=many", "train: steps must be int, got 'many' (str)"),
    ("train=3", "train must be a mapping, got 3"),
    ("data.source=wiki", "data: source must be dict, got 'wiki' (str)"),
])  # fmt: skip
def test_a_wrong_override_is_refused_with_the_file_and_the_place(path, override, message):
    with pytest.raises(ValueError) as error:
        config.load(path, [override])
    said = str(error.value)
    assert said.startswith(path) and said.endswith(message) and "\n" not in said


@pytest.mark.parametrize(("text", "message"), [
    ("- 1\n- 2\n", ": a config must be a mapping with model, data, …, got list"),
    ("", ": a config must be a mapping with model, data, …, got NoneType"),
    ("model: {type: masked_lm}\n", " needs data"),
    ("model: {type: masked_lm}\ndata: {sequence_length: 8}\n", ": data needs source"),
])  # fmt: skip
def test_a_file_that_is_no_config_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    refuses(f"{path}{message}", config.load, str(path))


def test_a_file_that_is_not_yaml_is_refused_in_one_line(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("model: {type: [\n")
    with pytest.raises(ValueError, match=f"^{path} is not YAML: [^\n]+$"):
        config.load(str(path))


def test_an_unknown_config_is_answered_with_the_nearest_name():
    message = "no config file 'mlm_c4/flsh', and no config of this name in the package; did you mean 'mlm_c4/flash'?"
    refuses(message, config.load, "mlm_c4/flsh")


def test_an_override_may_start_a_mapping_that_the_file_leaves_out(path):
    loaded = config.load(path, ["optimizer.clip.scope=global", "optimizer.clip.norm=2", "masking.rate=0.3"])
    assert (loaded.optimizer.clip.scope, loaded.optimizer.clip.norm, loaded.masking.rate) == ("global", 2, 0.3)

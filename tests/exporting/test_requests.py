"""What a server says to a bad request, and that it goes on to answer good ones."""

import numpy as np
import pytest

from tests.exporting import models

SECTIONS = models.sections()
LONG = "ab " * 60
FEW = np.array([[5, 6, 7]], "int32")


def state(**replaced):
    """Arguments of a step of one row of the quadratic model, with 40 places in its cache."""
    made = {"block_0_k": np.zeros((1, 40, 2, 8), "float32"), "block_0_v": np.zeros((1, 40, 2, 16), "float32")}
    return {"token": np.array([5], "int32"), "position": np.array([3], "int32"), **made, **replaced}


# What is asked, and what the error must say.
MASKED = {
    "no mask": ("fill_mask", {"text": np.array(["ab <mask>", "ab"])}, "each text needs a <mask>, got texts with"),
    "no token": ("fill_mask", {"text": np.array([" \n"])}, "each text needs a token"),
    "no text at all": ("embed", {"text": np.array([], "str")}, "a request needs one text or more"),
    "a text that is too long": ("score", {"text": np.array([LONG])}, "a text may have at most 40 tokens, got"),
    "an id outside the vocabulary": ("logits", {"ids": np.array([[5, 100]], "int32")}, "ids must be from 0 to 99, got"),
    "a negative id": ("logits", {"ids": np.array([[5, -1]], "int32")}, "ids must be from 0 to 99, got"),
    "a hole in a row": ("logits", {"ids": np.array([[5, 0, 6]], "int32")}, "must be at the end of a text only"),
}
CAUSAL = {
    "no token": ("generate", {"text": np.array(["ab", ""])}, "each text needs a token"),
    "a prompt that leaves no room": ("generate", {"text": np.array(["ab " * 19])}, "its 5 new tokens must fit 40"),
    "a prompt that is too long": (
        "prefill",
        {"ids": np.full((1, 41), 5, "int32")},
        "a text may have at most 40 tokens, got",
    ),
    "no row": ("initial_state", {"batch_size": np.int32(0)}, "a state needs a batch size of 1 or more, got"),
    "a token outside the vocabulary": ("decode_step", state(token=np.array([100], "int32")), "an id from 0 to 99, got"),
    "a full cache": ("decode_step", state(position=np.array([40], "int32")), "the state has room for 40 tokens"),
    "a state of another batch": (
        "decode_step",
        state(token=np.array([5, 6], "int32")),
        "block_0_k needs the first shape, got the second] [2 40 2 8] [1 40 2 8]",
    ),
    "a state of another model": (
        "decode_step",
        state(block_0_v=np.zeros((1, 40, 1, 16), "float32")),
        "block_0_v needs",
    ),
    "a state with a part missing": ("decode_step", {"token": np.array([5], "int32")}, "block_0_k"),
}
ASKED = {"masked-flash": MASKED, "causal-flash_quad": CAUSAL}


@pytest.fixture(scope="module")
def answers(tmp_path_factory, ask):
    """Of each bad request the answer, and of a good one before all and after each."""
    found = {}
    for name, bad in ASKED.items():
        folder = tmp_path_factory.mktemp(name)
        models.exported(models.directory(folder / "run", SECTIONS[name]), folder / "out")
        good = ("logits", {"ids": FEW}, None) if name.startswith("masked") else ("decode_step", state(), None)
        asked = [good]
        for signature, arguments, _ in bad.values():
            asked += [(signature, arguments, None), good]
        before, *rest = ask(folder / "out", asked)
        found |= {(name, what): (before, *rest[2 * i : 2 * i + 2]) for i, what in enumerate(bad)}
    return found


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, bad in ASKED.items() for what in bad])
def test_a_bad_request_is_an_error_that_says_what_was_needed_and_the_next_one_is_answered(answers, name, what):
    before, error, after = answers[name, what]
    assert isinstance(error, str) and ASKED[name][what][2] in error
    assert np.array_equal(after["logits"], before["logits"]) and np.isfinite(after["logits"]).all()


def test_a_model_whose_divisor_is_the_length_of_the_text_has_no_signature_that_decodes(tmp_path):
    section = SECTIONS["causal-flash_quad"]
    section = {**section, "mixer": {**section["mixer"], "divisor": "length"}}
    _, about = models.exported(models.directory(tmp_path, section), tmp_path / "out")
    assert set(about["signatures"]) == {"embed", "score", "logits"}

"""What a server says to malformed requests, and that it goes on to answer good ones."""

import numpy as np
import pytest

from flash_tf.exporting import saved_model
from tests.exporting import models

SECTIONS = models.sections()
LONG = "ab " * 60
FEW = np.array([[5, 6, 7]], "int32")
K, V = (1, 40, 2, 8), (1, 40, 2, 16)  # the cache of a row of the quadratic model, with 40 places


def ids(*rows):
    return {"ids": np.array(rows, "int32")}


def texts(*rows):
    return {"text": np.array(rows, "str")}


def state(**replaced):
    """Arguments of a step of one row of the quadratic model."""
    made = {"block_0_k": np.zeros(K, "float32"), "block_0_v": np.zeros(V, "float32")}
    given = {"token": np.array([5], "int32"), "position": np.array([3], "int32"), **made, **replaced}
    return {name: x for name, x in given.items() if x is not None}


def with_one(shape, number):
    x = np.zeros(shape, "float32")
    x.flat[-1] = number
    return x


# For each request: the signature, its arguments, and what the error must say.


def malformed(signature, argument, spelled, kind, good):
    """Requests with an argument of another shape or dtype, without it, and with another beside it.

    Args:
      signature: The signature.
      argument: The argument to spoil.
      spelled: Its dtype and shape in errors.
      kind: TensorFlow's name of its dtype.
      good: All arguments of a good request.
    """
    x = good[argument]
    flat = x.reshape(-1)[:1]
    shapes = {"one rank more": x[None], "two ranks more": x[None, None]} | ({"one rank less": x[0]} if x.ndim else {})
    for what, bad in shapes.items():
        got = " ".join(map(str, bad.shape))
        said = f"{signature} needs {argument} {spelled}, got the shape] [{got}]"
        yield f"{signature}: {argument} of {what}", (signature, {**good, argument: bad}, [said])
    dtypes = {"int32": "int32", "int64": "int64", "float32": "float", "float64": "double", "str": "string"}
    for dtype, name in dtypes.items():
        if name != kind:
            bad = np.full(x.shape, "1") if dtype == "str" else np.ones(x.shape, dtype)
            said = [f"signature_wrapper_{signature}_", f"expected to be a {kind} tensor but is a {name} tensor"]
            yield f"{signature}: {argument} in {dtype}", (signature, {**good, argument: bad}, said)
    rest = {name: x for name, x in good.items() if name != argument}
    yield f"{signature}: no {argument}", (signature, rest, [f"missing a required argument: '{argument}'"])
    more = {**good, "temperature": flat}
    yield f"{signature}: {argument} and more", (signature, more, ["unexpected keyword argument 'temperature'"])


def of_ids(signature):
    yield from malformed(signature, "ids", "int32 [?, ?]", "int32", {"ids": FEW})
    known = "ids must be from 0 to 99, got"
    end = "must be at the end of a text only"
    for what, given, said in [
        ("an id outside the vocabulary", ids([5, 100]), known),
        ("the largest id", ids([5, 2**31 - 1]), known),
        ("a negative id", ids([5, -1]), known),
        ("a hole in a row", ids([5, 0, 6]), end),
        ("padding at the start", ids([0, 5, 6]), end),
        ("a hole in the second row", ids([5, 6, 7], [5, 0, 6]), end),
        ("a row of padding", ids([5, 6], [0, 0]), "each text needs a token, got texts of lengths"),
        ("no row", {"ids": np.zeros((0, 5), "int32")}, "a request needs one text or more, got"),
        ("no column", {"ids": np.zeros((2, 0), "int32")}, "each text needs a token, got texts of lengths"),
        ("a long row", {"ids": np.full((1, 41), 5, "int32")}, "at most 40 ids, padding included, got] [41]"),
        ("a padded row", {"ids": np.pad(FEW, [(0, 0), (0, 38)])}, "at most 40 ids, padding included, got] [41]"),
        ("100,000 pads", {"ids": np.pad(FEW, [(0, 1), (0, 10**5)])}, "at most 40 ids, padding included, got] [100003]"),
    ]:
        yield f"{signature}: {what}", (signature, given, [said])


def of_text(signature, good):
    yield from malformed(signature, "text", "string [?]", "string", good)
    for what, given, said in [
        ("an empty text", texts(""), "each text needs a token"),
        ("white space", texts(" \n"), "each text needs a token"),
        ("an empty text beside another", texts("ab", ""), "each text needs a token"),
        ("no text", texts(), "a request needs one text or more"),
        ("a long text", texts(LONG), "a text may have at most 40 tokens, got"),
        ("a long text beside another", texts("ab", LONG), "a text may have at most 40 tokens, got"),
    ]:
        yield f"{signature}: {what}", (signature, given, [said])


def of_a_step():
    yield from malformed("decode_step", "token", "int32 [?]", "int32", state())
    yield from malformed("decode_step", "position", "int32 [?]", "int32", state())
    yield from malformed("decode_step", "block_0_k", "float32 [?, 40, 2, 8]", "float", state())
    other = "needs the first shape, got the second]"
    for what, replaced, said in [
        ("a token outside the vocabulary", {"token": np.array([100], "int32")}, "an id from 0 to 99, got"),
        ("a negative token", {"token": np.array([-1], "int32")}, "an id from 0 to 99, got"),
        ("a full cache", {"position": np.array([40], "int32")}, "the state has room for 40 tokens"),
        ("a negative position", {"position": np.array([-1], "int32")}, "position must not be negative, got] [-1]"),
        ("more tokens than states", {"token": np.array([5, 6], "int32")}, f"block_0_k {other} [2 40 2 8] [1 40 2 8]"),
        ("more positions than tokens", {"position": np.array([3, 3], "int32")}, f"position {other} [1] [2]"),
        (
            "heads of another model",
            {"block_0_v": np.zeros((1, 40, 1, 16), "float32")},
            "block_0_v float32 [?, 40, 2, 16]",
        ),
        (
            "places of another model",
            {"block_0_k": np.zeros((1, 41, 2, 8), "float32")},
            "block_0_k float32 [?, 40, 2, 8]",
        ),
        (
            "NaN in the state",
            {"block_0_k": with_one(K, np.nan)},
            "block_0_k must be finite, got numbers that are not:] [1]",
        ),
        ("infinity in the state", {"block_0_v": with_one(V, np.inf)}, "block_0_v must be finite"),
        ("minus infinity in the state", {"block_0_v": with_one(V, -np.inf)}, "block_0_v must be finite"),
    ]:
        yield f"decode_step: {what}", ("decode_step", state(**replaced), [said])


MASKED = {
    **dict(of_text("fill_mask", texts("ab <mask>"))),
    **dict(of_text("score", texts("ab"))),
    **dict(of_ids("logits")),
    "fill_mask: no mask": ("fill_mask", texts("ab <mask>", "ab"), ["each text needs a <mask>, got texts with"]),
}
CAUSAL = {
    **dict(of_text("generate", texts("ab"))),
    **dict(of_text("embed", texts("ab"))),
    **dict(of_ids("prefill")),
    **dict(of_a_step()),
    **dict(malformed("initial_state", "batch_size", "int32 []", "int32", {"batch_size": np.int32(1).reshape(())})),
    "initial_state: no row": (
        "initial_state",
        {"batch_size": np.int32(0)},
        ["a state needs a batch size of 1 or more"],
    ),
    "initial_state: less": ("initial_state", {"batch_size": np.int32(-3)}, ["a state needs a batch size of 1 or more"]),
    "generate: a prompt that leaves no room": ("generate", texts("ab " * 19), ["its 5 new tokens must fit 40"]),
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
    assert isinstance(error, str)
    for said in ASKED[name][what][2]:
        assert said in error
    assert np.array_equal(after["logits"], before["logits"]) and np.isfinite(after["logits"]).all()


def test_there_are_a_hundred_bad_requests():
    assert sum(map(len, ASKED.values())) >= 100


def test_a_model_whose_divisor_is_the_length_of_the_text_has_no_signature_that_decodes(tmp_path):
    section = SECTIONS["causal-flash_quad"]
    section = {**section, "mixer": {**section["mixer"], "divisor": "length"}}
    run, options = models.restored(models.directory(tmp_path, section)), saved_model.Options(new_tokens=models.NEW)
    assert set(saved_model.served(run, options).endpoints()) == {"embed", "score", "logits"}

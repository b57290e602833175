"""Exports of every model, masked and causal, in a process that has TensorFlow and TF-Text alone."""

import collections

import numpy as np
import pytest

from flash_tf import owned_files
from flash_tf.filling import fill_mask
from tests import tiers
from tests.backends import to_numpy
from tests.exporting import models
from tests.numerics import FLOAT32, relative_error

SECTIONS = models.sections()
NAMES = [*SECTIONS, "masked-ids", "causal-ids"]
KEPT = ("masked-flash", "causal-flash_quad")
TEXTS = ["ab cde <mask> abc", "<mask>", "a b c d e f g h i j <mask> k l m n o p abc <mask> d"]
PLAIN = [text.replace("<mask>", "fg") for text in TEXTS]
IDS = np.random.default_rng(0).integers(4, 100, (3, 21)).astype("int32")
LENGTHS = (21, 8, 1)  # across the end of a chunk, at it, before it
PADDED = np.where(np.arange(21) < np.array(LENGTHS)[:, None], IDS, 0)
STEPS = 11


def requests(name):
    """`(signature, arguments, before)` by a name for each."""
    text = "ids" if name.endswith("-ids") else "text"
    given = PADDED if text == "ids" else np.array(PLAIN)
    one = lambda i: given[i : i + 1] if text == "text" else given[i : i + 1, : LENGTHS[i]]  # noqa: E731
    asked = {"logits": ("logits", {"ids": PADDED}, None)}
    for signature in ("embed", "score"):
        asked[signature] = (signature, {text: given}, None)
        asked |= {f"{signature} {i}": (signature, {text: one(i)}, None) for i in range(3)}
    if name.startswith("masked"):
        masked = np.array(TEXTS) if text == "text" else np.where(np.arange(21) % 4 == 0, MASK, PADDED) * (PADDED > 0)
        asked["fill_mask"] = ("fill_mask", {text: masked}, None)
        return {**asked, "bad": ("fill_mask", {text: given}, None), "good": ("fill_mask", {text: masked[:1]}, None)}
    asked["generate"] = ("generate", {text: given}, None)
    asked |= {f"generate {i}": ("generate", {text: one(i)}, None) for i in range(3)}
    asked["prefill"] = ("prefill", {"ids": PADDED}, None)
    asked["start"] = ("initial_state", {"batch_size": np.int32(3)}, None)
    order = list(asked)
    for step in range(STEPS):
        asked[f"step {step}"] = ("decode_step", {"token": IDS[:, step]}, len(order) - 1 + step)
    asked["on"] = ("decode_step", {"token": IDS[:, 5]}, order.index("prefill"))
    return asked


MASK = 3  # the tokenizer's, of control symbols the first


@pytest.fixture(scope="module", params=tiers.thinned(NAMES, *KEPT))
def exported(request, tmp_path_factory, ask):
    """An export with its answers, and its name."""
    name, folder = request.param, tmp_path_factory.mktemp("export")
    section = name.replace("-ids", "-flash")
    model_dir = models.directory(folder / "run", SECTIONS[section])
    run, about = models.exported(model_dir, folder / "out", ids_only=name.endswith("-ids"))
    asked = requests(name)
    return models.Export(
        name, folder / "out", run, about, dict(zip(asked, ask(folder / "out", asked.values()), strict=True))
    )


each_masked, each_causal = (
    pytest.mark.parametrize(
        "exported", tiers.thinned([name for name in NAMES if name.startswith(kind)], *KEPT), indirect=True
    )
    for kind in models.TASKS
)


def test_logits_are_those_of_each_row_alone_in_python(exported):
    got, model = exported["logits"]["logits"], exported.run.model
    assert got.shape == (3, 21, 100) and got.dtype == np.float32
    for row, n in enumerate(LENGTHS):
        assert relative_error(got[row, :n], to_numpy(model(IDS[[row], :n]))[0]) < FLOAT32, row


@pytest.mark.parametrize("signature", ["embed", "score"])
def test_a_row_of_a_batch_gets_what_it_gets_alone(exported, signature):
    together = exported[signature]
    for i in range(3):
        for key, alone in exported[f"{signature} {i}"].items():
            got = together[key][i : i + 1]
            got = got[:, : alone.shape[1]] if key == "token_log_likelihoods" else got
            assert relative_error(got, alone) < FLOAT32, (key, i)


def test_an_embedding_is_the_mean_of_the_last_layer(exported):
    run = exported.run
    for i, ids in enumerate(given_ids(exported)):
        want = to_numpy(run.model.encode(ids[None]))[0].mean(0)
        assert relative_error(exported["embed"]["embedding"][i], want) < FLOAT32


def given_ids(exported):
    """What a request for each row reads."""
    if exported.name.endswith("-ids"):
        return [IDS[i, :n] for i, n in enumerate(LENGTHS)]
    return exported.run.tokenizer.encode(PLAIN)


def log_softmax(logits):
    logits = to_numpy(logits)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_a_score_adds_up_the_likelihood_of_each_token(exported):
    run, got = exported.run, exported["score"]
    for i, ids in enumerate(given_ids(exported)):
        n = len(ids)
        if run.model.causal:
            before = np.concatenate([[run.tokenizer.eos_id], ids[:-1]]).astype("int32")
            each_token = log_softmax(run.model(before[None]))[0, np.arange(n), ids]
        else:
            one_masked = np.where(np.eye(n, dtype=bool), run.tokenizer.mask_id, ids).astype("int32")
            each_token = log_softmax(run.model(one_masked))[np.arange(n), np.arange(n), ids]
        assert got["tokens"][i] == n
        assert relative_error(got["token_log_likelihoods"][i, :n], each_token) < FLOAT32
        assert not got["token_log_likelihoods"][i, n:].any()
        assert relative_error(got["log_likelihood"][i], each_token.sum()) < FLOAT32


@each_masked
def test_masks_are_filled_as_python_fills_them(exported):
    run, got = exported.run, exported["fill_mask"]
    assert run.tokenizer.mask_id == MASK
    if exported.name.endswith("-ids"):
        assert set(got) == {"masks", "ids", "probabilities"} and got["masks"].tolist() == [6, 2, 1]
        assert exported["fill_mask"]["ids"].shape == (3, 6, 3)
        return
    for i, text in enumerate(TEXTS):
        want = fill_mask(run.model, run.tokenizer, text, top_k=3, max_tokens=models.LENGTH)
        assert got["masks"][i] == len(want)
        for mask, candidates in enumerate(want):
            assert [x.decode() for x in got["tokens"][i, mask]] == [c["token"] for c in candidates]
            assert [x.decode() for x in got["texts"][i, mask]] == [c["text"] for c in candidates]
            probabilities = [c["probability"] for c in candidates]
            assert relative_error(got["probabilities"][i, mask], probabilities) < FLOAT32
        assert not got["probabilities"][i, len(want) :].any()


@each_masked
def test_a_text_without_a_mask_is_an_error_and_the_next_request_is_answered(exported):
    assert "needs a" in exported["bad"] and "mask" in exported["bad"]
    good, masks = exported["good"]["ids"], int(exported["good"]["masks"][0])
    assert good.tolist() == exported["fill_mask"]["ids"][:1, :masks].tolist()


def continued(run, ids):
    """Greedy by reading the text anew for each token, up to the end of a document."""
    text = list(ids)
    for _ in range(models.NEW):
        token = int(to_numpy(run.model(np.array([text], "int32")))[0, -1].argmax())
        if token == run.tokenizer.eos_id:
            break
        text.append(token)
    return text[len(ids) :]


@each_causal
def test_a_continuation_is_the_likeliest_token_after_the_other(exported):
    run, got = exported.run, exported["generate"]
    for i, ids in enumerate(given_ids(exported)):
        new = continued(run, ids)
        assert got["ids"][i].tolist() == new + [run.tokenizer.pad_id] * (models.NEW - len(new))
        assert exported[f"generate {i}"]["ids"].tolist() == got["ids"][i : i + 1].tolist()
        if not exported.name.endswith("-ids"):
            assert got["text"][i].decode() == run.tokenizer.decode([*ids, *new])
            assert got["continuation"][i].decode() == run.tokenizer.decode(new)


@each_causal
def test_single_steps_and_a_prompt_in_one_call_give_the_logits_of_the_whole(exported):
    run, got = exported.run, exported
    want = to_numpy(run.model(IDS))
    for step in range(STEPS):
        assert relative_error(got[f"step {step}"]["logits"], want[:, step]) < FLOAT32, step
    for row, n in enumerate(LENGTHS):
        assert relative_error(got["prefill"]["logits"][row], want[row, n - 1]) < FLOAT32
        text = np.concatenate([IDS[row, :n], IDS[row, 5:6]])[None]
        assert relative_error(got["on"]["logits"][row], to_numpy(run.model(text))[0, -1]) < FLOAT32
    assert got["on"]["position"].tolist() == [n + 1 for n in LENGTHS]
    assert not any(x.any() for x in got["start"].values())  # which is what TensorFlow Lite's users begin with
    assert {k for k in got["start"]} == {k for k in got["prefill"]} - {"logits"}


def test_an_export_says_what_it_is(exported):
    about, folder = exported.about, exported.folder
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert about["files"] == [path for path in there if path != owned_files.MANIFEST]
    assert {"assets.extra/config.yaml", "assets.extra/tokenizer.model", "assets.extra/versions.json"} < set(there)
    assert about["step"] == models.STEP and about["precision"] == "float32"
    assert "its text decides the licence" in about["vocabulary_licence"]
    assert about["reads"] == ("ids" if exported.name.endswith("-ids") else "text")
    assert about["signatures"]["logits"] == {
        "takes": {"ids": "int32 [?, ?]"},
        "gives": {"logits": "float32 [?, ?, 100]"},
    }
    assert list(about["signatures"])[0] == ("generate" if about["model"] == "causal_lm" else "fill_mask")


def library(folder):
    """The functions of a SavedModel's program, and their gradients."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    return saved.meta_graphs[0].graph_def.library


@pytest.mark.parametrize("name", tiers.thinned(["causal-linear_attention", "causal-flash"], "causal-linear_attention"))
def test_xla_compiles_the_steps_of_a_deep_model_that_says_so_and_it_answers_as_python(name, tmp_path, ask):
    model_dir, out = models.directory(tmp_path / "run", {**SECTIONS[name], "depth": 4}), tmp_path / "out"
    run, about = models.exported(model_dir, out, ids_only=True, jit_compile=True)
    saved = library(out)
    assert about["jit_compile"] and sum(function.attr["_XlaMustCompile"].b for function in saved.function) == 2
    assert not saved.gradient and not saved.registered_gradients
    ops = [node for function in saved.function for node in function.node_def]
    assert not any("_gradient_op_type" in node.attr for node in ops)  # whoever loads one is warned
    called = collections.Counter(node.attr["f"].func.name for node in ops if node.op.endswith("PartitionedCall"))
    assert max(called.values()) >= 4  # by every block
    answers_as_python(run, out, ask)


@pytest.mark.full
def test_a_deep_model_has_the_program_of_one_block_and_answers_as_python(tmp_path, ask):
    nodes = {}
    for depth in (3, 6):
        model_dir = models.directory(tmp_path / f"run{depth}", {**SECTIONS["causal-flash"], "depth": depth})
        out = tmp_path / f"out{depth}"
        run, about = models.exported(model_dir, out, ids_only=True)
        functions = library(out).function
        assert not about["jit_compile"] and not any(function.attr["_XlaMustCompile"].b for function in functions)
        nodes[depth] = sum(len(function.node_def) for function in functions)
    assert nodes[6] < 1.3 * nodes[3], nodes
    answers_as_python(run, out, ask)


@pytest.mark.full
def test_xla_compiles_steps_with_a_cache_and_they_answer_as_python(tmp_path, ask):
    model_dir, out = models.directory(tmp_path / "run", SECTIONS["causal-flash_quad"]), tmp_path / "out"
    run, _ = models.exported(model_dir, out, ids_only=True, jit_compile=True)
    answers_as_python(run, out, ask)


def answers_as_python(run, out, ask):
    """A bad step between two good ones is an error."""
    step = lambda column, before: ("decode_step", {"token": IDS[:, column]}, before)  # noqa: E731
    asked = [("generate", {"ids": PADDED}, None), ("prefill", {"ids": IDS[:, :9]}, None), step(9, 1)]
    whole = ("logits", {"ids": IDS}, None)
    answer, _, one, bad, other, logits = ask(out, [*asked, ("decode_step", {}, 1), step(10, 2), whole])
    prompts = [row[:length] for row, length in zip(IDS, LENGTHS, strict=True)]
    chosen = run.model.generate(prompts, models.NEW, stop_tokens=[run.tokenizer.eos_id])
    assert [[token for token in row if token] for row in answer["ids"].tolist()] == chosen
    assert isinstance(bad, str)
    for got, tokens in ((one, 10), (other, 11)):
        assert relative_error(got["logits"], to_numpy(run.model(IDS[:, :tokens]))[:, -1]) < FLOAT32
    assert relative_error(logits["logits"], to_numpy(run.model(IDS))) < FLOAT32

"""A trained model of the quickstart's size generates the tokens that one pass over the whole text predicts."""

import json

import numpy as np
import pytest
from keras import ops

import flash_tf
from flash_tf.generation import decoding
from flash_tf.generation.generator import compiled
from flash_tf.scoring import Scorer
from flash_tf.training.restore import restore
from tests import numerics
from tests.backends import to_numpy
from tests.training import runs

CHUNK, STEPS = 64, 70  # across the end of a chunk from any start
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK)
MIXERS = {
    "flash": {"type": "flash", "chunk_size": CHUNK, "key_dim": 64},
    "flash_quad": {"type": "gau", "key_dim": 64},
    "transformer_plus_plus": {"type": "self_attention", "heads": 4, "rotary": True},
}


def train(folder, mixer, steps, **model):
    runs.corpus(folder)
    model = {"type": "causal_lm", "norm": "layer_norm", "width": 128, "depth": 4, "mixer": mixer, **model}
    sizes = {"steps": steps, "tokens_per_step": 2048, "steps_per_loop": 10, "checkpoint_every": 100}
    path = runs.write(folder, model=model, data={"sequence_length": 256}, train=sizes, evaluation={"every": None})
    runs.in_child(runs.train, path, folder / "run")
    return folder / "run"


def loaded(folder):
    model = flash_tf.load(folder)
    ids = np.concatenate(model.tokenizer.encode([(folder.parent / "train.txt").read_text()]))
    return model, model.tokenizer, np.tile(ids, 20_000 // len(ids) + 1), folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return loaded(train(tmp_path_factory.mktemp("trained"), MIXERS["flash"], 40))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A block of the same chunks: the default tier compares what is said of one model in two ways."""
    return loaded(train(tmp_path_factory.mktemp("small"), MIXERS["flash"], 10, width=32, depth=1))


def assert_said_by_one_pass(model, text, first, logits):
    """Streamed logits from token `first` on equal the logits of one pass, and each token is among the likeliest."""
    want = to_numpy(model(text[None, :-1].astype("int32")))[0, first - 1 :]
    assert numerics.relative_error(logits, want) < numerics.FLOAT32
    tolerance = numerics.FLOAT32 * np.abs(want).max()
    chosen = np.take_along_axis(want, text[first:, None], axis=-1)[:, 0]
    assert (want.max(-1) - chosen <= tolerance).all()


def streamed(model, prompts, steps, at=lambda step, state: state):
    """Greedy tokens and their logits, token by token; `at` sees the state before each."""
    width = max(map(len, prompts))
    ids = np.array([np.pad(prompt, (0, width - len(prompt))) for prompt in prompts], np.int32)
    lengths = ops.convert_to_tensor([len(prompt) for prompt in prompts], "int32")
    logits, state = model.extend(ops.convert_to_tensor(ids), model.initial_state(len(ids)), lengths, last=True)
    held, logits, program, found = decoding.cast_weights(model, state), logits[:, 0], None, []
    for step in range(steps):
        found.append(to_numpy(logits))
        tokens = ops.convert_to_tensor(found[-1].argmax(-1), "int32")
        given = (held, tokens, at(step, state))
        if program is None:
            program = compiled(model, lambda *given: decoding.next_logits(model, *given), *given)
        logits, state = program(*given)
    logits = np.stack(found, axis=1)
    return logits.argmax(-1), logits


@pytest.mark.full
def test_a_batch_of_lengths_around_the_ends_of_chunks_gives_what_one_pass_says(trained):
    model, _, ids, _ = trained
    prompts = [ids[:length] for length in LENGTHS]
    tokens, logits = streamed(model, prompts, STEPS)
    assert tokens.tolist() == model.generate(prompts, STEPS)
    for prompt, row, said in zip(prompts, tokens, logits, strict=True):
        assert_said_by_one_pass(model, np.concatenate([prompt, row]), len(prompt), said)
    assert len({token for row in tokens.tolist() for token in row}) > 5  # it learned more than one token


@pytest.mark.full
def test_a_state_that_was_saved_goes_on_as_if_it_had_not_been(trained, tmp_path):
    model, _, ids, _ = trained

    def through_a_file(step, state):
        if step != STEPS // 2:
            return state
        np.savez(tmp_path / "state.npz", **{name: ops.convert_to_numpy(x) for name, x in model.flush(state).items()})
        with np.load(tmp_path / "state.npz") as saved:
            return {name: ops.convert_to_tensor(saved[name]) for name in state}

    prompts = [ids[:100], ids[100:137]]
    assert streamed(model, prompts, STEPS, through_a_file)[0].tolist() == model.generate(prompts, STEPS)


@pytest.mark.full
def test_a_text_of_twenty_thousand_tokens_is_continued_as_one_pass_says(trained):
    model, _, ids, _ = trained
    prompt = ids[: 20_000 - STEPS]
    tokens, logits = streamed(model, [prompt], STEPS)
    assert tokens.tolist() == model.generate([prompt], STEPS)
    assert_said_by_one_pass(model, np.concatenate([prompt, tokens[0]]), len(prompt), logits[0])


@pytest.mark.full
def test_text_goes_in_and_comes_out(small):
    model, tokenizer, _, folder = small
    words = (folder.parent / "train.txt").read_text().split()[:4]
    text = model.generate(" ".join(words), 8)
    assert text.startswith(" ".join(words)) and len(text) > len(" ".join(words))
    pieces = list(model.stream(" ".join(words), 8))
    assert " ".join(words) + "".join(pieces) == text and len(pieces) > 1
    rows = list(zip(*model.stream([" ".join(words), words[0]], 8), strict=True))
    assert " ".join(words) + "".join(piece or "" for piece in rows[0]) == text
    assert words[0] + "".join(piece or "" for piece in rows[1]) == model.generate(words[0], 8)


def whole(model, tokenizer, text, window=None):
    """Log-likelihood of a document, from one pass over each window of it."""
    ids = np.array([tokenizer.eos_id, *tokenizer.encode([text])[0], tokenizer.eos_id], np.int32)
    total, window = 0.0, window or len(ids)
    for start in range(0, len(ids) - 1, window):
        end = min(start + window, len(ids) - 1)
        part = ids[max(0, end - window) : end + 1]  # the last window ends with the document
        logits = to_numpy(model(part[None, :-1]))[0]
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        total += np.take_along_axis(logits, part[1:, None], axis=-1)[start - end :].sum()
    return total, len(ids) - 1


def test_a_document_of_any_length_scores_as_in_one_pass(small):
    model, tokenizer, _, folder = small
    text = (folder.parent / "validation.txt").read_text()
    documents = [text[:40], text, " ".join([text] * 4)]
    found = list(Scorer(model).documents(documents))
    for row, document in zip(found, documents, strict=True):
        total, tokens = whole(model, tokenizer, document)
        assert (row["tokens"], row["words"]) == (tokens, len(document.split()))
        assert row["log_likelihood"] == pytest.approx(total, rel=numerics.FLOAT32)
    assert found[-1]["tokens"] > 1100  # several blocks


@pytest.mark.full
@pytest.mark.parametrize("name", ["flash_quad", "transformer_plus_plus"])
def test_a_model_with_a_cache_scores_in_windows_of_its_training(name, tmp_path):
    run = restore(str(train(tmp_path, MIXERS[name], 1)))
    text = " ".join([(tmp_path / "validation.txt").read_text()] * 2)
    (row,) = Scorer(run.model, window=256).documents([text])
    total, tokens = whole(run.model, run.tokenizer, text, 256)
    assert row["tokens"] == tokens > 512
    assert row["log_likelihood"] == pytest.approx(total, rel=numerics.FLOAT32)


def test_the_commands_say_what_the_functions_give(small, tmp_path):
    model, tokenizer, _, folder = small
    prompt = " ".join((folder.parent / "train.txt").read_text().split()[:3])
    want = model.generate(prompt, 8)
    status, live, _ = runs.command(tmp_path, "generate", folder, "--prompt", prompt, "--max-new-tokens", 8)
    assert (status, live) == (0, want + "\n")
    file = tmp_path / "file.txt"
    file.write_text("\n".join((folder.parent / "validation.txt").read_text().splitlines()[:3]))
    status, out, _ = runs.command(tmp_path, "score", folder, file, "--documents", "line", "--json")
    found = json.loads(out)
    rows = list(Scorer(model).documents(file.read_text().splitlines()))
    assert [row["tokens"] for row in found["documents"]] == [row["tokens"] for row in rows]
    total = sum(row["log_likelihood"] for row in rows)
    assert found["total"]["log_likelihood"] == pytest.approx(total, rel=numerics.FLOAT32)
    words = sum(row["words"] for row in rows)
    assert found["total"]["word_perplexity"] == pytest.approx(np.exp(-total / words), rel=1e-3)


def test_the_command_scores_continuations_of_prefixes(small, tmp_path):
    model, _, _, folder = small
    words = (folder.parent / "validation.txt").read_text().split()
    prompt = " ".join(words[:3])
    greedy = model.generate(prompt, 4).removeprefix(prompt)
    pairs = [(prompt, " " + words[3]), (f"{prompt} ", words[3]), (prompt, greedy), ("", words[0])]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prefix": a, "continuation": b}) + "\n" for a, b in pairs))
    status, out, _ = runs.command(tmp_path, "score", folder, file, "--conditional", "--json")
    found, rows = json.loads(out), Scorer(model).continuations(pairs)
    for row, other in zip(found["continuations"], rows, strict=True):
        assert row == {**other, "log_likelihood": pytest.approx(other["log_likelihood"], rel=numerics.FLOAT32)}
    assert rows[0] == rows[1]
    assert found["total"]["continuations"] == 4
    assert found["total"]["greedy"] == sum(row["greedy"] for row in rows)

"""Greedy decoding: what it chooses, what it leaves, and what its compiled loop does to the state."""

import re

import keras
import numpy as np
import pytest
from keras import ops

from flash_tf.generation import decode, greedy
from flash_tf.models.causal_lm import CausalLM
from flash_tf.models.masked_lm import MaskedLM
from tests import backends, tiers
from tests.backends import compiled, on_jax_compiled, to_numpy
from tests.contracts.test_streams import B, C, V, begun, model_of, one_of_each_state, token_ids
from tests.numerics import FLOAT32, relative_error

STEPS = C + 3  # across the end of a chunk


def continued(model, ids, steps):
    """Greedy decoding by reading the whole text anew for each token."""
    rows, n = ids.shape
    text = np.concatenate([ids, np.zeros((rows, steps), "int32")], axis=1)  # what comes later changes nothing
    read = on_jax_compiled(lambda text: model(text))
    for at in range(n, n + steps):
        text[:, at] = to_numpy(read(text))[:, at - 1].argmax(-1)
    return text


def prefilled(model, ids, **options):
    """The state after all but the last token of each row, and that token."""
    read = on_jax_compiled(lambda ids, state: model.extend(ids, state, **options))
    _, state = read(ops.convert_to_tensor(ids[:, :-1]), begun(model, len(ids)))
    return ops.convert_to_tensor(ids[:, -1]), state


@one_of_each_state
@pytest.mark.parametrize("rows", tiers.thinned([1, 2], 2))
def test_greedy_decoding_equals_reading_the_text_anew_for_each_token(kind, rows):
    model, ids = model_of(kind), token_ids(rows, 19)
    want = continued(model, ids, STEPS)
    chosen, state = compiled(lambda tokens, state: greedy(model, tokens, state, STEPS))(*prefilled(model, ids))
    assert to_numpy(chosen).tolist() == want[:, 19:].tolist()
    _, same = prefilled(model, want)
    assert state.keys() == same.keys()
    for name in same:
        assert relative_error(to_numpy(state[name]), to_numpy(same[name])) < FLOAT32, name


@pytest.mark.one_backend
def test_a_loop_whose_last_token_fills_a_chunk_closes_it():
    model, ids = model_of("flash"), token_ids(1, 2 * C + 1)  # the state has seen two chunks, and reads one more
    _, state = greedy(model, *prefilled(model, ids), C)
    _, same = prefilled(model, continued(model, ids, C))
    for name in same:
        assert relative_error(to_numpy(state[name]), to_numpy(same[name])) < FLOAT32, name


@pytest.mark.one_backend
def test_many_rows_close_their_chunks_one_by_one_and_all_at_once():
    # Of 20 rows more than two at a time close together, below that one after the other.
    model, rows, n = model_of("flash"), 20, 2 * C
    lengths = np.array([C + 4] * 5 + [n] * 3 + [*range(1, 8), C + 1, C + 1, 3, C, C + 6])  # tokens before the last
    ids = token_ids(rows, n + 1)
    _, state = model.extend(
        ops.convert_to_tensor(ids[:, :-1]), begun(model, rows), ops.convert_to_tensor(lengths, "int32")
    )
    tokens = np.take_along_axis(ids, lengths[:, None], axis=1)[:, 0]
    run = compiled(lambda tokens, state: greedy(model, tokens, state, STEPS))
    chosen, _ = run(ops.convert_to_tensor(tokens), state)
    text, every = np.pad(ids, ((0, 0), (0, STEPS))), np.arange(rows)
    for step in range(STEPS):  # all rows at once: what comes after a row's last token changes nothing
        at = lengths + step
        text[every, at + 1] = to_numpy(model(text))[every, at].argmax(-1)
    want = np.take_along_axis(text, lengths[:, None] + 1 + np.arange(STEPS), axis=1)
    assert to_numpy(chosen).tolist() == want.tolist()


@pytest.mark.one_backend
def test_a_model_that_nobody_has_called_generates_and_stays_whole():
    backends.seed(0)
    model = CausalLM(V, width=16, depth=1, mixer={"type": "flash", "chunk_size": 4, "key_dim": 8})
    want = model.generate([[5, 17, 3]], 4)  # on JAX, a program that made variables would take them with it
    assert model.generate([[5, 17, 3]], 4) == want == [[token for (token,) in model.stream([[5, 17, 3]], 4)]]
    assert to_numpy(model(np.array([[5, 17, 3]]))).argmax(-1)[0, -1] == want[0][0]


@tiers.full_on_jax
def test_a_chooser_sees_the_logits_and_the_number_of_the_step():
    model, ids = model_of("flash", depth=1), token_ids(B, 9)
    likely, _ = greedy(model, *prefilled(model, ids), 3)
    chosen, _ = decode(model, *prefilled(model, ids), 3, lambda logits, step: ops.argmax(logits, axis=-1) * 0 + step)
    assert to_numpy(chosen).tolist() == [[0, 1, 2]] * B
    unlikely, _ = decode(model, *prefilled(model, ids), 3, lambda logits, step: ops.argmin(logits, axis=-1))
    assert to_numpy(unlikely)[:, 0].tolist() != to_numpy(likely)[:, 0].tolist()


@pytest.mark.one_backend
def test_decoding_leaves_the_weights_as_they_are():
    model, ids = model_of("flash", depth=1, dtype="mixed_bfloat16"), token_ids(B, 9)
    before = model.get_weights()
    greedy(model, *prefilled(model, ids), 2)
    assert all(np.array_equal(new, old) for new, old in zip(model.get_weights(), before, strict=True))
    assert keras.backend.standardize_dtype(model(ids).dtype) == "bfloat16"


@tiers.full_on_jax
def test_bad_arguments_are_named():
    model = model_of("flash")
    with pytest.raises(ValueError, match="steps >= 1, got 0"):
        greedy(model, *prefilled(model, token_ids(B, 9)), 0)
    with pytest.raises(ValueError, match="as many rows as there are token_ids, 3, got 2"):
        greedy(model, ops.zeros((3,), "int32"), model.initial_state(2), 1)
    with pytest.raises(ValueError, match="token_ids, 2, got no state"):
        model.extend(token_ids(2, 5), {})
    masked = MaskedLM(V, width=16, depth=1, mixer={"type": "gau", "key_dim": 8})
    with pytest.raises(ValueError, match="causal language model, got MaskedLM"):
        greedy(masked, None, {}, 1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"depth": 3}, "with no block_2/"),
        ({"width": 16}, r"with block_0/open \[b, 8, 96\], got block_0/open \[b, 8, 64\]"),
        ({"mixer": {"type": "retention", "heads": 2}}, r"with block_0/.*, got no block_0/"),
    ],
)
def test_a_state_of_another_model_is_named(other, message):
    model = model_of("flash")
    options = {"vocabulary_size": V, "width": model.width, "depth": 2, "mixer": model.mixer, **other}
    state = CausalLM(**options).initial_state(B)
    with pytest.raises(ValueError, match=f"{model.name} needs a state of its own, {message}"):
        model.extend(token_ids(B, 1), state)


@tiers.full_on_jax
@pytest.mark.parametrize(
    "mixer",
    [
        {"type": "gau", "key_dim": 8},
        {"type": "self_attention", "heads": 2},
        {"type": "flash_weighted", "key_dim": 8, "chunk_size": 8},
        {"type": "combiner", "heads": 2, "chunk_size": 8},
    ],
    ids=lambda mixer: mixer["type"],
)
def test_a_full_cache_is_an_error_and_one_that_is_filled_to_its_end_is_none(mixer):
    model = CausalLM(V, width=16, depth=1, mixer=mixer, feedforward={"type": "glu"})
    _, state = model.extend(token_ids(B, 13), model.initial_state(B, 16))
    _, full = model.extend(token_ids(B, 3), state)
    room = "room for (16|23) tokens a row, got rows of 1[36] and"  # what remains of the last chunk may be more
    with pytest.raises(ValueError, match=room):
        model.extend(token_ids(B, 11), state)
    with pytest.raises(ValueError, match=room):
        model.extend(token_ids(B, 9), full, valid=ops.convert_to_tensor([9] * B, "int32"))
    model.extend(token_ids(B, 11), state, valid=ops.convert_to_tensor([3] * B, "int32"))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="reads what TensorFlow's XLA made")
@pytest.mark.parametrize("rows", tiers.thinned([1, 2, 20], 20))
def test_a_step_of_the_compiled_loop_copies_no_buffer_of_the_state(rows):
    import tensorflow as tf

    model = model_of("flash")
    state = begun(model, rows)
    program = tf.function(lambda tokens, state: greedy(model, tokens, state, STEPS), jit_compile=True)
    text = program.experimental_get_compiler_ir(ops.zeros((rows,), "int32"), state)(stage="optimized_hlo")
    buffers = {",".join(map(str, x.shape)) for name, x in state.items() if name != "position"}
    steps = [part for part in text.split("\n\n") if part.startswith("%") and " while(" in part]
    assert len(steps) == 1 and len(buffers) == 2  # the loop of steps is the one in which another is, that closes chunks
    assert all(f"f32[{shape}]" in steps[0] for shape in buffers)
    assert not buffers & set(re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", steps[0]))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="JAX has XLA everywhere")
def test_a_step_without_xla_multiplies_no_buffer_of_the_state_number_by_number():
    import tensorflow as tf

    model = model_of("flash")
    state = begun(model, 3)
    width = {x.shape[2] for name, x in state.items() if name.endswith("sum")}
    terms = {}
    for xla in (False, True):
        step = tf.function(lambda ids, state: model.extend(ids, state), autograph=False, jit_compile=xla)
        graph = step.get_concrete_function(ops.zeros((3, 1), "int32"), state).graph
        shapes = [tuple(op.outputs[0].shape) for op in graph.get_operations() if op.type == "Mul"]
        terms[xla] = [x for x in shapes if len(x) == 3 and x[0] == 3 and x[1] > 1 and x[2] in width]
    assert terms[True] and not terms[False], terms

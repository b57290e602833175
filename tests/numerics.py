"""How close is close, and what kernels are fed: every tolerance and every random input of the tests."""

import numpy as np

# n is prime: never a multiple of a chunk
SIZES = {"b": 2, "n": 37, "h": 2, "s": 8, "e": 16, "r": 8, "d": 12, "m": 40, "w": 4, "k": 3}

# Relative root-mean-square errors, but for the factor.
FLOAT64 = 1e-12  # some thousand roundings of 1.1e-16, in another order of summation
REFERENCE = {"tensorflow": FLOAT64, "jax": 1e-6}  # on JAX Keras takes means, sines and cosines of float64 in float32
FLOAT32 = 1e-5  # some hundred roundings of 6e-8
PUBLIC = 1e-4  # of logits of a public library's model, whose sums run in another order through a few layers
FLOAT32_RUN = 1e-4  # of the losses of a few steps: each step's update passes the roundings before it on, and grows them
BFLOAT16 = 2**-8  # one rounding of the result to 8 significant bits (2^-9), and as much for float32 angles
BFLOAT16_LAYER = 2**-5  # a dozen roundings of 2^-9, one after the other
ROUNDED = 1e-11  # a second difference over a step of 1e-8: its curvature leaves 1e-14, one rounding to float32 6e-8
RANDOM_FEATURES = 0.05  # of softmax attention by 8,192: a weight exp(q k) is off by exp(|q + k|^2 / 2) / sqrt(8,192)
INT8 = 0.05  # weights and activations of two layers on 255 levels, a rounding of half a percent each
BFLOAT16_FACTOR = 2  # times the reference's own error in bfloat16, which nobody can avoid

ALIVE = 0.1  # share of numbers that are not zero: relu² drops about half, masks and first chunks their part
ALIVE_OUTPUT = (1e-4, 10)  # root mean square of a layer's output at initialization, for inputs of 1
ALIVE_GRADIENT = (1e-3, 10)  # root mean square of a weight's gradient: at least of the median weight's, at most of √n

DEAD_ROW_SUM = 1e-3  # of a gated unit's quadratic weights: above 2e-3 at a live start, below 1e-5 at a dead one
DEAD_GRADIENT = 1e-3  # root mean square of a weight's gradient, over the median weight's


def inputs(spec, *, seed=0, first_position=0, **sizes):
    """Float64 arrays, exact in float32, of the axes that a kernel declares; `positions` are int32.

    Their numbers are normal, or even over the range that the kernel says they have.
    """
    sizes = {**SIZES, **sizes}
    rng = np.random.default_rng(seed)

    def draw(name, axes):
        if name == "positions":
            offsets = rng.integers(first_position, first_position + 50, [sizes["b"], 1])
            return (offsets + np.arange(sizes["n"])).astype("int32")
        if name in spec.ranges:
            return rng.uniform(*spec.ranges[name], size=[sizes[a] for a in axes]).astype("float32").astype("float64")
        deviation = 1 if "n" in axes else 0.1  # of parameters: a large negative bias would silence all of relu²
        return np.asarray(deviation * rng.normal(size=[sizes[a] for a in axes]), "float32").astype("float64")

    return {name: draw(name, axes) for name, axes in spec.inputs.items()}


def tokens(spec, arrays, start, stop):
    """Tokens `start` to `stop` of every row; parameters stay as they are."""
    return {name: x[:, start:stop] if "n" in spec.inputs[name] else x for name, x in arrays.items()}


def rows(spec, arrays, order):
    """The rows `order` of every input; parameters stay as they are."""
    return {name: x[order] if "b" in spec.inputs[name] else x for name, x in arrays.items()}


def masks(layout, b=SIZES["b"], n=SIZES["n"]):
    """Mask arguments of a batch that is `whole`, `padded` (holes anywhere) or `packed` (documents with holes)."""
    rng = np.random.default_rng(7)
    holes = {"padding_mask": rng.random([b, n]) < 0.8}
    if layout != "packed":
        return holes if layout == "padded" else {}
    # Names of documents need no order, 0 is padding, and the longest document spans several chunks.
    runs = np.array([[3, 3], [1, 9], [0, 2], [7, 4], [2, n - 18]], "int32")
    shuffled = [rng.permutation(runs) for _ in range(b)]
    return {"segment_ids": np.stack([np.repeat(run[:, 0], run[:, 1]) for run in shuffled]), **holes}


def real_tokens(masked, b=SIZES["b"], n=SIZES["n"]):
    """`[b, n]`, True where the mask arguments leave a token; elsewhere outputs mean nothing."""
    return masked.get("padding_mask", np.ones([b, n], bool)) & (masked.get("segment_ids", np.ones([b, n])) > 0)


def at(real, x):
    """`x` with zeros outside the tokens `real [b, n]`."""
    return np.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, 0)


def random_pieces(seed):
    """Where pieces of a row of `n` tokens begin and end: of one token up to several chunks, in random order."""
    ends = np.cumsum(np.random.default_rng(seed).permutation([1, 1, 1, 5, 5, 5, 19]))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def relative_error(got, want):
    """Root-mean-square error over root-mean-square of `want`; infinite unless both are finite and of one shape."""
    got, want = np.asarray(got, "float64"), np.asarray(want, "float64")
    if got.shape != want.shape or not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def errors(got, want):
    return {name: relative_error(got[name], want[name]) for name in want}


# What compilers say of a program, over what they say of one that does the same work.
LOOP_FLOPS = 0.01  # of FLOPs: a loop's counter and bounds are a few beside its products
LOOP_CYCLES = 3  # times: each pass copies what it carries, and what the gradient needs: as long as products of 1,024
LINEAR = 1.15  # times, of the cost of a token at 1,024 times the length: sums over chunks of chunks add up to 12 %
QUADRATIC = 0.05  # of 2, the exponent of n between lengths at which pairs are nearly all of the work
TRACE_CLOCK = 0.05  # of the time of steps: marking them and the clock's own call lie outside the other's span

# Times the least gradient of a weight that is alive, of those that are fainter by their formula. Combiner's first on a
# summary: it reads the mean of a chunk, which of noise is near nothing, and acts on one key in a softmax over a chunk.
# Its bias reads nothing, and acts on that key alone: 9e-4 of the median where one token has the loss, as in an answer.
FAINT = {"summary_in/kernel": 0.03, "summary_in/bias": 0.3}
# Mamba's layers start with a hundredth from states and the rest from D x: this is what sets the pace of states.
FAINT |= {name: 0.03 for name in ("log_decay_rate", "mixer/log_decay_rate", "step_bias", "mixer/step_bias")}
FAINT["step_projection/kernel"] = 0.01
# The heads that weigh chunks read means of chunks as well, and act on a softmax over few.
FAINT |= {f"offset_scale/gamma_sum_{head}": 0.1 for head in "qk"}
# The heads of scores at the scale "paper_appendix", of key width 128: the other head is 0.02 z, where it is z at the
# scale "normalized", and the scores are not divided by the root of the width.
FAINT_AT_PAPERS_SCALE = {f"offset_scale/gamma_{head}": 0.02 * 128**0.5 for head in ("q", "k", "quad_q", "quad_k")}

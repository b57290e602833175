"""Forward FLOPs per token of every mixer, by its formulas: products with weights, then what tokens do with each other.

One function a mixer, named after it in the registry, `(mixer, n) -> FLOPs per token`: a multiply-add is two, and causal
attention is half of the pairs.
"""

import math


def half(mixer):
    return 0.5 if mixer.causal else 1


def self_attention(mixer, n):
    return 2 * (4 + mixer.gated) * mixer.width**2 + half(mixer) * 4 * n * mixer.width


def _gated_unit(mixer):
    """Projections, and what a pair of tokens costs."""
    d, s = mixer.width, mixer.key_dim
    e = mixer.expansion * d
    return 2 * (d * (2 * e + s) + e * d), 2 * (s + e)


def quadratic(mixer, n):
    projections, pair = _gated_unit(mixer)
    wider = 0 if mixer.gated else mixer.expansion * mixer.width  # the gate's columns are values
    return projections + 2 * wider * mixer.width + half(mixer) * n * (pair + 2 * wider)


def mixed_chunk(mixer, n):
    projections, pair = _gated_unit(mixer)
    inside = half(mixer) * mixer.chunk_size * pair
    before = mixer.overlapping * mixer.chunk_size * (1 - mixer.chunk_size / n) * pair  # the first chunk has none
    across = 4 * mixer.key_dim * mixer.expansion * mixer.width
    first = {"none": 0, "cls": 1, "chunks": n / mixer.chunk_size}[mixer.first_to_all] * pair
    near = inside + before + first
    return projections + {"both": near + across, "local": near, "global": across}[mixer.parts]


def weighted_chunks(mixer, n):
    """FLASH, and of all pairs of chunks a score, and a matrix that is added under it."""
    projections, pair = _gated_unit(mixer)
    matrix = mixer.key_dim * mixer.expansion * mixer.width
    among_chunks = half(mixer) * 2 * n / mixer.chunk_size**2 * (mixer.key_dim + matrix)
    return projections + half(mixer) * mixer.chunk_size * pair + 4 * matrix + among_chunks


def combiner(mixer, n):
    d, c = mixer.width, mixer.chunk_size
    others = half(mixer) * 4 * (n / c - 1) * d  # summaries of other chunks, and the pairs inside the own
    if mixer.summaries == "fixed":
        return 8 * d**2 + half(mixer) * 4 * c * d + others + 4 * d
    return 12 * d**2 + 4 * c * d + half(mixer) * 4 * c * d + others


def mixed_chunk_self_attention(mixer, n):
    d = mixer.width
    return _states(4 * d**2, d, d, mixer.heads) + half(mixer) * 4 * mixer.chunk_size * d


def diag_attention(mixer, n):
    return 8 * mixer.width**2 + half(mixer) * 4 * mixer.chunk_size * mixer.width


def linear_attention(mixer, n):
    d, r = mixer.width, (mixer.random_features or 128) if mixer.features == "favor" else 0
    keys = (r * mixer.heads or d) * (2 if mixer.cosine_length else 1)
    product = half(mixer) * 2 * n * keys * d / mixer.heads if mixer.form == "matmul" else 0
    return _states(4 * d**2 + 2 * r * d, keys, d, mixer.heads) + product


def retention(mixer, n):
    return _states(8 * mixer.width**2, mixer.width, 2 * mixer.width, mixer.heads)


def gated_linear_attention(mixer, n):
    d = mixer.width
    gates = 16 * {"key": d + d / 2, "value": 2 * d, "both": 3 * d + d / 2, "none": 0}[mixer.gates]
    return _states(4 * d**2 + gates, d / 2, d, mixer.heads)


def mamba(mixer, n):
    d, e, r, s = mixer.width, 2 * mixer.width, -(-mixer.width // 16), mixer.state_size
    return _states(d * 2 * e + 4 * e + e * (r + 2 * s) + r * e + e + e * d, e, s, 1)  # 4 of the convolution, and D


def kernelized_attention(mixer, n):
    return 8 * mixer.width**2 + 4 * n * mixer.width


def nystromformer(mixer, n):
    """To the landmarks, from them, among them, and six steps of four products for their inverse."""
    d, t = mixer.width, mixer.landmarks
    return 8 * d**2 + 8 * t * d + (4 * t**2 * d + 48 * t**3 * mixer.heads) / n


def skyformer(mixer, n):
    return nystromformer(mixer, n)


def linformer(mixer, n):
    return 8 * mixer.width**2 + 8 * mixer.rank * mixer.width


def informer(mixer, n):
    """Of all queries with the sample, and of those that attend with all keys and values."""
    return 8 * mixer.width**2 + 6 * mixer.queries * mixer.width


def reformer(mixer, n):
    hashes, seen = mixer.buckets * mixer.width, 8 * mixer.chunk_size * mixer.width
    return 6 * mixer.width**2 + mixer.rounds * (hashes + seen)


def bigbird(mixer, n):
    """What blocks see, and the first and the last, which see all and are seen by all."""
    return 8 * mixer.width**2 + 4 * (7 + mixer.random_blocks) * mixer.chunk_size * mixer.width


def transformer_ls(mixer, n):
    """Windows, sums of keys and values, attention to them, and what weighs them."""
    d, c, r = mixer.width, mixer.chunk_size, mixer.landmarks
    made = 8 * d**2 + 4 * r * d + 2 * d * mixer.heads * r
    if not mixer.causal:
        return made + 4 * (2 * c + r) * d
    before = 1 - c / n  # of tokens: the first segment has none before it
    return made + 4 * (c / 2 + before * c + (n / c - 1) / 2 * r) * d


def parallel(mixer, n):
    return sum(forward_flops(part, n) for part in mixer.parts)


def _states(weights, keys, values, heads):
    """Weights, and a state of keys times values a head, to add to and to read."""
    return 2 * weights + 4 * keys * values / heads


def _by_weights_and_kernel(mixer, n):
    """A mixer around one kernel: two for each number of a matrix, and the kernel's own."""
    weights = sum(math.prod(weight.shape) for weight in mixer.trainable_variables if len(weight.shape) == 2)
    return 2 * weights + mixer.spec.flops(mixer.sizes(n=n), mixer.case) / n


def forward_flops(mixer, n):
    """FLOPs per token of a built mixer over a text of n tokens."""
    formula = globals().get(type(mixer).__module__.rpartition(".")[2], _by_weights_and_kernel)
    return formula(mixer, n)

"""Forward FLOPs per token of every mixer, by its formulas: products with weights, then what tokens do with each other.

One function a mixer, named after it in the registry, `(mixer, n) -> FLOPs per token`: a multiply-add is two, and causal
attention is half of the pairs.
"""


def half(mixer):
    return 0.5 if mixer.causal else 1


def self_attention(mixer, n):
    return 2 * 4 * mixer.width**2 + half(mixer) * 4 * n * mixer.width


def _gated_unit(mixer):
    """Projections, and what a pair of tokens costs."""
    d, s = mixer.width, mixer.key_dim
    e = mixer.expansion * d
    return 2 * (d * (2 * e + s) + e * d), 2 * (s + e)


def quadratic(mixer, n):
    projections, pair = _gated_unit(mixer)
    return projections + half(mixer) * n * pair


def mixed_chunk(mixer, n):
    projections, pair = _gated_unit(mixer)
    return projections + half(mixer) * mixer.chunk_size * pair + 4 * mixer.key_dim * mixer.expansion * mixer.width


def diag_attention(mixer, n):
    return 8 * mixer.width**2 + half(mixer) * 4 * mixer.chunk_size * mixer.width


def linear_attention(mixer, n):
    return _states(4 * mixer.width**2, mixer.width * (2 if mixer.cosine_length else 1), mixer.width, mixer.heads)


def retention(mixer, n):
    return _states(8 * mixer.width**2, mixer.width, 2 * mixer.width, mixer.heads)


def gated_linear_attention(mixer, n):
    d = mixer.width
    return _states(4 * d**2 + 16 * (d + d / 2), d / 2, d, mixer.heads)


def _states(weights, keys, values, heads):
    """Weights, and a state of keys times values a head, to add to and to read."""
    return 2 * weights + 4 * keys * values / heads


def forward_flops(mixer, n):
    """FLOPs per token of a built mixer over a text of n tokens."""
    return globals()[type(mixer).__module__.rpartition(".")[2]](mixer, n)

"""Token mixers: `[b, n, d]` in, `[b, n, d]` out, one file each.

Beside Keras' methods a mixer has: `align`, the multiple at which a packed document must start to equal itself alone;
`flops(n)`, forward FLOPs over one sequence; `state_bytes(n, itemsize)`, its decode state for one sequence of up to n
tokens, or None if it cannot decode; `activations(n)`, numbers kept per token for the backward pass, an estimate. All
but `align` are known once it is built.
"""

from flash_tf.registry import Registry

MIXERS = Registry("mixer", folder=__name__, common=("name", "dtype"))

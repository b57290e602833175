"""Feed-forward layers of Transformer blocks: `[..., d]` in, `[..., d]` out, one file each.

Beside Keras' methods, each has `flops(n)` and `activations(n)`, as a mixer does, and `tokenwise = True`: it reads each
token alone, so that a stream needs no state for it.
"""

from flash_tf.registry import Registry

FEEDFORWARDS = Registry("feedforward", folder=__name__, common=("name", "dtype"))

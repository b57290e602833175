"""Feed-forward layers of Transformer blocks: `[..., d]` in, `[..., d]` out, one file each.

Beside Keras' methods, each has `flops(n)` and `activations(n)`, as a mixer does.
"""

from flash_tf.registry import Registry

FEEDFORWARDS = Registry("feedforward", folder=__name__, common=("name", "dtype"))

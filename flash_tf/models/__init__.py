"""Models: embedding, a residual stack of any mixer, a head. One file a task."""

from flash_tf.registry import Registry

MODELS = Registry("model", folder=__name__, common=("name", "dtype"))

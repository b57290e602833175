"""Models: embedding, a residual stack of any mixer, a head. One file a task.

`MODELS` has those that `flash-tf train` trains, by the names that a config gives them; the others are for `fit`.
"""

from flash_tf.registry import Registry

MODELS = Registry("model", folder=__name__, common=("name", "dtype"))

"""The base of layers and models."""

import inspect

from flash_tf.registry import check_values


class Base:
    """A base before Keras' own.

    An option of another type than its annotation is a ValueError that names it, as in a config. `trainable=False`,
    given or read from a file, also holds for the layers that `build` makes. Keras freezes those alone that were there
    before.
    """

    def __new__(cls, *args, **kwargs):
        parameters = inspect.signature(cls).parameters
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        check_values(cls, {name: x for name, x in given.items() if name in parameters}, where=cls.__name__)
        return super().__new__(cls, *args, **kwargs)

    def _post_build(self):
        super()._post_build()
        if not self.trainable:  # which an assignment would not change, so that it would do nothing
            for part in (*self._flatten_layers(include_self=False), *self.weights):
                part.trainable = False


class SameShape(Base):
    """The base of layers whose output has the shape of their input.

    Their `build` calls it `x_shape` too: Keras gives it by its name there.
    """

    def compute_output_shape(self, x_shape: tuple) -> tuple:
        return x_shape  # Keras on JAX cannot trace an unknown length, and TimeDistributed asks each layer

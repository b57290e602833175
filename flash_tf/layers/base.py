"""The base of layers and models."""

from flash_tf.registry import check_values, named


class Base:
    """A base before Keras' own.

    An option of another type than its annotation is a ValueError that names it, as in a config. The options that a
    subclass from elsewhere adds are its own affair. `trainable=False`, given or read from a file, also holds for the
    layers that `build` makes. Keras freezes those alone that were there before.

    Attributes:
      given_options: The names of the options of this package that were given to a subclass which does not name them.
    """

    def __new__(cls, *args, **kwargs):
        ours = next(one for one in cls.__mro__ if one.__module__.partition(".")[0] == "flash_tf")
        own, known = named(cls), named(ours)
        positional = own if len(args) <= len(own) else [*own, *(name for name in known if name not in own)]
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        checked = known if cls is ours else [name for name in known if name not in own]
        check_values(ours, {name: given[name] for name in checked if name in given}, where=cls.__name__)
        made = super().__new__(cls, *args, **kwargs)
        object.__setattr__(made, "given_options", [name for name in known if name in given and name not in own])
        return made

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

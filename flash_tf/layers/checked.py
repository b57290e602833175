"""A base of layers and models whose options are checked in Python as they are in a config."""

import inspect

from flash_tf.registry import check_values


class Checked:
    """A base before Keras' own: an option of another type than its annotation is a ValueError that names it."""

    def __new__(cls, *args, **kwargs):
        parameters = inspect.signature(cls).parameters
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        check_values(cls, {name: x for name, x in given.items() if name in parameters}, where=cls.__name__)
        return super().__new__(cls, *args, **kwargs)

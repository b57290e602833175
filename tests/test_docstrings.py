"""The examples in the docstrings of the public API."""

import doctest
import importlib
import inspect
import pkgutil

import keras
import pytest

import flash_tf.layers
import flash_tf.models

MODULES = [
    module.name
    for package in (flash_tf.layers, flash_tf.models)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
OTHERS = ["flash_tf.generation.samplers", "flash_tf.loading"]


def public_layers(module):
    """The layers and models that a module defines and a user builds: registered, and not an old name."""
    return [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if cls.__module__ == module.__name__ and keras.saving.get_registered_name(cls).startswith("flash_tf>")
        if {"__init__", "call"} & vars(cls).keys()
    ]


@pytest.mark.parametrize("name", MODULES + OTHERS)
def test_the_examples_of_a_module_run_and_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    module = importlib.import_module(name)
    globs = {**vars(flash_tf.layers), **vars(module)}
    result = doctest.testmod(module, globs=globs, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_every_public_layer_and_model_has_an_example():
    classes = [cls for name in MODULES for cls in public_layers(importlib.import_module(name))]
    assert len(classes) >= len(MODULES) // 2
    assert [cls.__name__ for cls in classes if ">>> " not in cls.__doc__] == []

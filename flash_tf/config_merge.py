"""Merges, overrides and compares configs as nested mappings, before they are dataclasses."""

from collections.abc import Mapping
from typing import Any

from flash_tf import strict_yaml


def merge(base: Mapping, values: Mapping, depth: int = 0) -> dict:
    """Merges `values` over `base`: key by key if both values are mappings, else the new value wins.

    A mapping inside a section, such as a mixer, replaces the other one if it has a `type`: its options differ from
    another mixer's. A whole section, such as the model, is always merged: causal and masked models share their options.
    """
    if depth > 1 and "type" in values:
        return dict(values)
    merged = dict(base)
    for key, value in values.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value, depth + 1) if both else value
    return merged


def set_option(values: dict, override: str) -> None:
    """Applies `key.of.option=value`, with a value in YAML, to nested mappings; ValueError if it has another form."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"--set needs key=value, got {override!r}")
    *parents, last = key.strip().split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ValueError(f"--set {override}: {parent} is not a mapping")
    values[last] = strict_yaml.load(text, f"--set {override}: the value")


def differences(a: Mapping, b: Mapping, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The dotted keys whose values differ in two mappings, with both values."""
    found = []
    for key in sorted({*a, *b}):
        one, two = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found += differences(one, two, f"{prefix}{key}.")
        elif one != two:
            found.append((f"{prefix}{key}", one, two))
    return found

"""What is done to a config before it is one: nested mappings as YAML gives them."""

from collections.abc import Mapping
from typing import Any

import yaml


def merge(base: Mapping, values: Mapping, depth: int = 0) -> dict:
    """`values` over `base`: key by key where both have a mapping, else the value.

    A part of a section, as a mixer, with a `type` of its own replaces the other: options of one are not another's. A
    section, as the model, does not: causal models and masked ones have the same.
    """
    if depth > 1 and "type" in values:
        return dict(values)
    merged = dict(base)
    for key, value in values.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value, depth + 1) if both else value
    return merged


def set_option(values: dict, override: str) -> None:
    """Applies `key.of.option=value` to nested mappings, the value as YAML; ValueError if it is not of that form."""
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
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override}: the value is not YAML") from error


def differences(a: Mapping, b: Mapping, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Keys, dotted, at which two mappings differ, with both values."""
    found = []
    for key in sorted({*a, *b}):
        one, two = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found += differences(one, two, f"{prefix}{key}.")
        elif one != two:
            found.append((f"{prefix}{key}", one, two))
    return found

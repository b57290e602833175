"""YAML for configs: plain values alone, and no text that YAML 1.1 reads as something else than people do."""

import re
from typing import Any

import yaml

CHARACTERS, VALUES, LEVELS = 2**18, 10_000, 32  # of a config at most; aliases count with all that they stand for


def load(text: str | bytes, where: str) -> Any:
    """The value of a YAML document: mappings with text as keys, lists, text, numbers, true, false and null.

    `1:30` and `010` are text, and not numbers in base 60 and 8. A date is text. `3e-4` is a number.

    Args:
      text: The document; bytes are UTF-8.
      where: Its place, for messages.

    Raises:
      ValueError: It is not YAML, has a key twice or a tag, is too large or too deep, or contains itself.
    """
    if len(text) > CHARACTERS:
        raise ValueError(f"{where} needs to have at most {CHARACTERS:,} characters, got {len(text):,}")
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        loader = _Loader(text)  # which looks for characters that YAML forbids
        root = loader.get_single_node()
        return None if root is None else loader.construct_document(root)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not YAML: byte 0x{error.object[error.start]:02x} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {_reason(error)}") from None


class _Loader(yaml.SafeLoader):
    """Counts values and levels while it reads, so that no text takes long."""

    def __init__(self, text):
        super().__init__(text)
        self._level = 0
        self._sizes = {}  # node -> the number of its values, aliases written out

    def compose_node(self, parent, index):
        event = self.peek_event()
        self._level += 1
        self._check(event)
        node = super().compose_node(parent, index)
        self._level -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._sizes[node] = 1 + sum(self._sizes[child] for child in _children(node))
        elif node not in self._sizes:
            raise _error("it contains itself", event)
        if self._sizes[node] > VALUES:
            raise _error(f"it has more than {VALUES:,} values, aliases written out", event)
        return node

    def _check(self, event):
        if self._level > LEVELS:
            raise _error(f"it has more than {LEVELS} levels", event)
        if len(self._sizes) > VALUES:
            raise _error(f"it has more than {VALUES:,} values", event)
        if getattr(event, "tag", None) is not None:
            raise _error(f"a value has no tag, got {event.tag.replace(YAML, '!!')}", event)
        if not getattr(event, "value", "").isascii() and re.search("[\ud800-\udfff]", event.value):
            raise _error("text needs whole characters, got half of a surrogate pair", event)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if key.tag not in (f"{YAML}str", f"{YAML}merge"):
                raise _error("a key needs to be text", key)
            if key.value in seen:
                raise _error(f"the key {key.value!r} is there twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


YAML = "tag:yaml.org,2002:"
PLAIN = {
    "int": r"[-+]?(0|[1-9][0-9_]{0,99}|0x[0-9a-fA-F]{1,99}|0b[01]{1,99})$",
    "float": r"([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.removeprefix(YAML) in ("null", "bool", "merge")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in PLAIN.items():
    _Loader.add_implicit_resolver(f"{YAML}{_kind}", re.compile(_pattern), list("-+.0123456789"))


def _children(node):
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _error(problem, at):
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _reason(error):
    """What is wrong, and where."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).partition("\n")[0].split())
    context = " ".join(filter(None, (error.context, error.problem)))
    return f"{' '.join(context.split())}, line {mark.line + 1}, column {mark.column + 1}"

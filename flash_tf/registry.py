"""Names for the components that a YAML file may choose. Plain Python, without Keras or configs."""

import difflib
import importlib
import inspect
import numbers
import pkgutil
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

C = TypeVar("C", bound=type)

MOST = {int: 2**32 - 1, float: 3.4e38}  # the largest numbers of an option: a seed's, and float32's


class Registry:
    """One kind of component (a mixer, a model, a data source). Each component is a file of one folder.

    The first look-up imports the folder's files, and each file registers its class. The constructor of a registered
    class is its schema: its annotated parameters are the only options.

    Args:
      kind: The kind's name, for error messages.
      folder: The package with the components' modules.
      common: Options that every component of this kind takes through **kwargs, such as `name` and `dtype`.
      current: Maps a mapping with old names to today's names.
    """

    def __init__(
        self,
        kind: str,
        folder: str,
        *,
        common: tuple[str, ...] = (),
        current: Callable[[Any], Any] = lambda spec: spec,
    ):
        self.kind = kind
        self._folder = folder
        self._current = current
        self._common = common
        self._classes: dict[str, type] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Decorates a class: `type: name` in YAML then means that class."""

        def add(cls: C) -> C:
            if name in self._classes:
                raise ValueError(f"two {self.kind}s are called {name!r}: {self._classes[name]} and {cls}")
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        for module in pkgutil.iter_modules(importlib.import_module(self._folder).__path__):
            importlib.import_module(f"{self._folder}.{module.name}")
        return sorted(self._classes)

    def get(self, name: str) -> type:
        """The class called `name`; ValueError with the nearest name if there is none."""
        if name not in (known := self.names()):
            near = hint(name, known) or "."
            raise ValueError(f"no {self.kind} is called {name!r}{near} There are: {', '.join(known)}")
        return self._classes[name]

    def check(self, spec: Any) -> None:
        """Raises a ValueError unless `spec` is `{"type": name, **options}` with options of that class."""
        spec = self._typed(spec)
        options = {k: v for k, v in spec.items() if k != "type" and k not in self._common}
        check_options(self.get(spec["type"]), options, where=f"{self.kind} {spec['type']!r}")

    def _typed(self, spec):
        spec = self._current(spec)
        if not isinstance(spec, Mapping) or "type" not in spec:
            raise ValueError(f"a {self.kind} needs a mapping with a `type`, got {spec!r}")
        return spec

    def build(self, spec: Mapping[str, Any], **extra: Any) -> Any:
        """Builds a component from `{"type": name, **options}`, as in YAML; `extra` has the caller's own options."""
        spec = self._typed(spec)
        self.check({**spec, **extra})
        if given := sorted(spec.keys() & extra.keys()):
            raise ValueError(
                f"{self.kind} {spec['type']!r}: the package sets {given[0]} itself; remove it from the options"
            )
        options = {**spec, **extra}
        return self.get(options.pop("type"))(**options)


def takes_options_of(base: type, without: tuple[str, ...] = ()) -> Callable[[C], C]:
    """Decorates a class whose `**kwargs` go to `base`: its signature names the options of `base` too.

    Args:
      base: A class with an annotated `__init__`.
      without: Options of `base` that the class does not take.
    """

    def add(cls: C) -> C:
        theirs = inspect.signature(base).parameters
        _, *own, rest = inspect.signature(cls.__init__).parameters.values()  # `self` first, `kwargs` last
        known = {rest.name, *without, *(p.name for p in own)}
        added = {name: p for name, p in theirs.items() if name not in known}
        named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in added.values()]
        cls.__signature__ = inspect.Signature([*own, *named, rest])
        cls.__init__.__annotations__ |= {name: p.annotation for name, p in added.items()}
        return cls

    return add


def check_options(cls: type, options: Mapping[str, Any], *, where: str) -> None:
    """Raises a ValueError if the options do not fit a class. It names the option, the need and the finding.

    Args:
      cls: A class with an annotated `__init__`: a Keras layer or a dataclass.
      options: Keyword arguments for the class.
      where: The place of the options, for the message, for example `mixer 'gau'`.
    """
    parameters = check_names(cls, options, where=where)
    check_values(cls, options, where=where)
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in options]
    if missing:
        raise ValueError(f"{where} needs {', '.join(missing)}")


def check_names(cls: type, options: Iterable[str], *, where: str) -> dict[str, inspect.Parameter]:
    """The options of a class. Raises a ValueError if it has not got one of `options`. See `check_options`."""
    parameters = {
        name: p for name, p in inspect.signature(cls).parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD
    }
    for name in options:
        if name not in parameters:
            raise ValueError(f"{where} has no option {name!r}{hint(name, parameters)}")
    return parameters


def named(cls: type) -> list[str]:
    """The names of a constructor's arguments, without `*args` and `**kwargs`."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in inspect.signature(cls).parameters.items() if p.kind not in several]


def check_values(cls: type, options: Mapping[str, Any], *, where: str) -> None:
    """Raises a ValueError if a value has not the annotated type, or is too large a number. See `check_options`."""
    hints = get_type_hints(cls.__init__)
    for name, value in options.items():
        if (needed := hints.get(name, Any)) and not fits(value, needed):
            raise ValueError(f"{where}: {name} must be {spell(needed)}, got {value!r} ({type(value).__name__})")
        for at, number in _numbers(value, name):
            if not abs(number) <= (most := MOST[type(number)]):
                raise ValueError(f"{where}: {at} must be a finite number of at most {most}, got {number}")


def _numbers(value, name):
    """The dotted name and the value of every number in an option."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _numbers(one, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _numbers(one, name)
    elif type(value) in MOST:
        yield name, value


def fits(value: Any, needed: Any) -> bool:
    """Whether a value has the annotated type. An int is a float, NumPy's numbers are numbers; True is not an int."""
    origin = get_origin(needed)
    if needed is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in get_args(needed))
    if origin is typing.Literal:
        return value in get_args(needed)
    if origin in (list, tuple) and get_args(needed):
        return isinstance(value, list | tuple) and all(fits(v, get_args(needed)[0]) for v in value)
    if needed is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if needed is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    cls = origin or needed
    cls = (list, tuple) if cls in (list, tuple) else cls
    return not isinstance(cls, type | tuple) or isinstance(value, cls)


def spell(needed: Any) -> str:
    """The annotated type in words: `int or null`, `one of 'a', 'b'`."""
    if get_origin(needed) in (typing.Union, types.UnionType):
        return " or ".join(spell(one) for one in get_args(needed))
    if get_origin(needed) is typing.Literal:
        return f"one of {', '.join(map(repr, get_args(needed)))}"
    if needed is type(None):
        return "null"
    if get_origin(needed) in (list, tuple):
        return f"a list of {spell(get_args(needed)[0])}"
    return getattr(get_origin(needed) or needed, "__name__", str(needed))


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` if a known name is near, else nothing."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def mixer_name(mixer: dict | list[dict]) -> str:
    """The name of a model's `mixer`: its type, or its types."""
    return ", ".join(dict.fromkeys(kind["type"] for kind in listed(mixer)))


def listed(mixer: dict | list[dict]) -> list[dict]:
    """A model's `mixer` as a list, with one entry if all blocks have the same mixer."""
    return list(mixer) if isinstance(mixer, list | tuple) else [mixer]

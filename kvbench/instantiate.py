"""Builds objects from configuration: ``_target_`` names a class, the other keys are its arguments.

The constructor is the schema: names and simple types are checked against its signature before it is called, so that a
mistake in a command is told in the user's words.
"""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.core import KvbenchError

_UNIONS = (typing.Union, types.UnionType)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "text",
    bool: "true or false",
    type(None): "null",
}
"""The types that values of a configuration have, in a user's words."""


def locate(target: str, where: str) -> Any:
    """The object that a dotted path names.

    Raises:
        KvbenchError: there is no such module, or it has no such name.
    """
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise KvbenchError(
                f"{where}._target_={target}: there is no module {error.name}; give package.module.Class, importable "
                "from the current directory"
            ) from None
        raise KvbenchError(f"{where}._target_={target}: importing it needs {error.name}, which is missing") from None
    except ValueError:
        raise KvbenchError(f"{where}._target_={target} is no dotted path; give package.module.Class") from None
    if not callable(found := getattr(module, name, None)):
        raise KvbenchError(f"{where}._target_={target}: {module_name} has no class {name}{_hint(name, vars(module))}")
    return found


def instantiate(node: object, where: str, **given: object) -> Any:
    """Build the object that ``node`` describes.

    Args:
        node: a mapping with ``_target_``; nested mappings that have one are built first.
        where: the node's place in the configuration, for messages.
        given: arguments that the configuration does not hold.

    Raises:
        KvbenchError: an unknown target or argument, a missing argument, a value of another type, or what the
            constructor itself refuses.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        raise KvbenchError(f"{where} names no class; give {where}._target_=package.module.Class")
    target = locate(node["_target_"], where)
    arguments: dict[str, Any] = {
        str(key): instantiate(value, f"{where}.{key}") if isinstance(value, Mapping) and "_target_" in value else value
        for key, value in node.items()
        if key != "_target_"
    }
    if twice := sorted(arguments.keys() & given.keys()):
        raise KvbenchError(f"{where}.{twice[0]} is set by kvbench itself and cannot be given")
    check_arguments(target, arguments, where, given)
    return target(**arguments, **given)


def check_arguments(target: Any, arguments: Mapping[str, Any], where: str, given: Collection[str] = ()) -> None:
    """Compare arguments with the signature of ``target``.

    Args:
        target: a class or function.
        arguments: from the configuration.
        where: their place in it; empty at the top level.
        given: names of the arguments that kvbench adds itself.

    Raises:
        KvbenchError: an unknown or missing argument, or a value that is none of the simple types it is annotated with.
    """
    prefix = f"{where}." if where else ""
    parameters = _parameters(target)
    names = [name for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name in (*arguments, *given):
        if name not in parameters and not open_ended:
            allowed = ", ".join(each for each in names if each not in given) or "nothing"
            raise KvbenchError(f"{prefix}{name} does not exist: {target.__name__} takes {allowed}{_hint(name, names)}")
    hints = _hints(target)
    for name in names:
        default = parameters[name].default
        if name not in arguments and name not in given and default is inspect.Parameter.empty:
            raise KvbenchError(f"{prefix}{name} is missing: {target.__name__} needs it; add +{prefix}{name}=...")
        if name in arguments and name in hints and not _fits(arguments[name], hints[name]):
            raise KvbenchError(
                f"{prefix}{name}={arguments[name]!r} is not {_words(hints[name])}; "
                + (f"the default is {default!r}" if default is not inspect.Parameter.empty else "give one")
            )


def whole(name: str, value: object, least: int = 1) -> int:
    """The value as an int; raises KvbenchError unless it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise KvbenchError(f"{name}={value} is not possible; give a whole number of at least {least}")
    return value


def takes(target: Any, name: str) -> bool:
    """Whether a class or function has an argument of this name."""
    return name in _parameters(target)


@cache
def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(target).parameters


@cache
def _hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError):  # a user's class may annotate with names that exist for the type checker only
        return {}


@cache
def _taken_apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value of the configuration has the annotated type; annotations of objects fit everything."""
    origin, parts = _taken_apart(hint)
    if origin in _UNIONS:
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(key, parts[0]) and _fits(each, parts[1]) for key, each in value.items()
        )
    if hint not in _WORDS:
        return True
    if isinstance(value, bool):
        return hint is bool
    return type(value) in _ACCEPTED.get(hint, (hint,))


_ACCEPTED: dict[type, tuple[type, ...]] = {float: (int, float), Path: (str,)}


def _words(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(map(_words, parts)))
    if origin is typing.Literal:
        return " or ".join(map(str, parts))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of {_words(parts[0])} to {_words(parts[1])}"
    return _WORDS[hint] if hint in _WORDS else str(hint)


def _hint(name: str, names: Any) -> str:
    close = get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""

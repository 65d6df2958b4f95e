"""``python -m kvbench.verify package:Class``: is this an allocator? Every law of the protocol, held or broken.

The class is built as ``Class(num_slots=..., **options)``; nothing else is asked of it, neither a base class nor a
registration.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from kvbench import command
from kvbench.allocators.base import Ability, Allocator
from kvbench.core import KvbenchError

if TYPE_CHECKING:
    from kvbench.testing import Broken, Law

STORAGE = "HYPOTHESIS_STORAGE_DIRECTORY"
NUM_SLOTS = 130  # eight blocks of 16 and two slots more: what matters happens when a pool is full


def main(argv: Sequence[str] | None = None) -> int:
    """Verify the allocator that the command line names.

    Args:
        argv: the arguments, by default those of the process.

    Returns:
        The exit status: 0 where every law holds, 1 where one is broken, 2 where the allocator cannot be built.
    """
    options = _parser().parse_intermixed_args(argv)
    return command.run("kvbench.verify", lambda: _verify(options), "the laws were not all tried")


def _verify(options: argparse.Namespace) -> int:
    for name in ("examples", "num_slots"):
        if (value := getattr(options, name)) < 1:
            raise KvbenchError(f"--{name.replace('_', '-')}={value}: give at least 1")
    build, shown = _builder(options)
    with TemporaryDirectory(prefix="kvbench-verify-") as scratch, _storage(scratch):
        return _examine(build, shown, options.examples)


def _examine(build: Callable[[], Allocator], shown: str, num_examples: int) -> int:
    try:
        from kvbench.testing import Law, examine
        from kvbench.testing.laws import noting_tried
    except ModuleNotFoundError as error:
        raise KvbenchError(f"the conformance suite needs {error.name}; pip install {error.name}") from None
    with noting_tried() as tried:
        broken = examine(build, num_examples)
    print(report(shown, getattr(build(), "abilities", Ability.NONE), broken, tried, list(Law)))
    return 1 if broken else 0


def report(
    shown: str, abilities: Ability, broken: dict[Law, Broken], tried: Collection[Law], laws: Sequence[Law]
) -> str:
    """The laws, each passed, FAILED, not asked or not reached, and for each that failed the calls that show it.

    Args:
        shown: what was tested, as the headline.
        abilities: what the allocator declares.
        broken: what failed.
        tried: what could have been broken; the first law that breaks ends a run, so others may never come to that.
        laws: all of them, in the order to print.
    """
    lines = [shown, f"declares {_named(abilities)}", ""]
    verdicts = [_verdict(law, abilities, broken, tried) for law in laws]
    for law, verdict in zip(laws, verdicts, strict=True):
        why = f" (needs {law.needs.name})" if verdict == "not asked" else ""
        lines.append(f"  {verdict:11}  {law.name.lower():11}  {law.value}{why}")
    for failure in broken.values():
        lines += ["", str(failure)]
    held = f"{verdicts.count('passed')} of {len(laws) - verdicts.count('not asked')} laws hold"
    if missed := verdicts.count("not reached"):
        held += f"; not reached: {missed}, as what failed ends a run before; mend that, and verify again"
    lines += ["", held]
    return "\n".join(lines)


def _verdict(law: Law, abilities: Ability, broken: dict[Law, Broken], tried: Collection[Law]) -> str:
    if law in broken:
        return "FAILED"
    if law.needs not in abilities:
        return "not asked"
    return "not reached" if broken and law not in tried else "passed"


@contextmanager
def _storage(folder: str) -> Iterator[None]:
    """Keep hypothesis from leaving a folder of its own wherever this is called."""
    before = os.environ.get(STORAGE)
    os.environ[STORAGE] = folder
    try:
        yield
    finally:
        os.environ.pop(STORAGE)
        if before is not None:
            os.environ[STORAGE] = before


def _named(abilities: Any) -> str:
    names = [ability.name or "" for ability in abilities] if isinstance(abilities, Ability) else []
    return ", ".join(names) or "no abilities"


def _builder(options: argparse.Namespace) -> tuple[Callable[[], Allocator], str]:
    """What builds the allocator, tried once, and how to call it in a report."""
    kind = _imported(options.allocator)
    arguments: dict[str, Any] = {"num_slots": options.num_slots}
    if options.block_size is not None:
        arguments["block_size"] = options.block_size
    for pair in options.options:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise KvbenchError(f"{pair!r} is not an option of the allocator; write key=value")
        if name in arguments:
            raise KvbenchError(f"{name} is given twice; give it once")
        arguments[name] = _parsed(text)
    shown = f"{options.allocator}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def build() -> Allocator:
        allocator: Allocator = kind(**arguments)
        return allocator

    try:
        allocator = build()
    except Exception as error:
        raise KvbenchError(f"cannot build {shown}: {_one_line(error)}") from error
    if getattr(allocator, "num_slots", options.num_slots) != options.num_slots:
        raise KvbenchError(f"{shown} says num_slots={allocator.num_slots}; it must say what it was given")
    return build, shown


def _imported(name: str) -> Callable[..., Any]:
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name):
        raise KvbenchError(f"{name!r} names no class; write package.module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise KvbenchError(f"cannot import {name}: {_one_line(error)}") from error
    if not callable(found):
        raise KvbenchError(f"{name} is not a class; write package.module:Class")
    kind: Callable[..., Any] = found
    return kind


def _parsed(text: str) -> object:
    """A value as YAML reads it, so as on every other command of kvbench."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, KvbenchError) else f"{type(error).__name__}: {text}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.verify",
        description="Test an allocator against the laws of kvbench's protocol. The exit code is 0 if all of them hold.",
    )
    parser.add_argument("allocator", metavar="package:Class", help="built as Class(num_slots=..., key=value ...)")
    parser.add_argument("options", metavar="key=value", nargs="*", help="further arguments of the class")
    parser.add_argument("--num-slots", type=int, default=NUM_SLOTS, help="the pool; small finds more (%(default)s)")
    parser.add_argument("--block-size", type=int, help="the same as block_size=...")
    parser.add_argument("--examples", type=int, default=200, help="random runs at each depth (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

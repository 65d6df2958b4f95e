"""Wrong calls: what a scheduler must never do, and an allocator must refuse without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvbench.allocators.base import Ability, AllocationError
from kvbench.testing.laws import Law
from kvbench.testing.shadow import Shadow
from kvbench.testing.subject import Key, Mistake


def mistakes(shadow: Shadow) -> list[Mistake]:
    """Every wrong call that the present state allows."""
    subject, live = shadow.subject.allocator, shadow.live
    nobody, other = shadow.freed[-1][0] if shadow.freed else Key("Nobody", 0), Key("Other", 1)
    some = live[-1].key if live else nobody
    found = [
        Mistake(f"free({nobody!r})", Law.ERRORS, (KeyError,), partial(subject.free, nobody)),
        Mistake(f"allocate({other!r}, 0)", Law.ERRORS, (ValueError,), partial(subject.allocate, other, 0)),
        Mistake(f"allocate({other!r}, -1)", Law.ERRORS, (ValueError,), partial(subject.allocate, other, -1)),
    ]
    if live:
        raises = (ValueError, AllocationError)
        found.append(Mistake(f"allocate({some!r}, 1)", Law.ERRORS, raises, partial(subject.allocate, some, 1)))
    if Ability.GROW in shadow.subject.abilities:
        due = [seq.key for seq in live if not seq.room]
        for keys in ([nobody, *due], [*due, nobody]):
            text = f"append({keys}), {nobody!r} holding nothing,"
            found.append(Mistake(text, Law.ERRORS, (KeyError, AllocationError), partial(subject.append, keys, [])))
    else:
        text = f"append([{some!r}]), which is not declared,"
        found.append(Mistake(text, Law.ABILITIES, (Exception,), lambda: subject.append([some], [])))
    if Ability.FORK in shadow.subject.abilities:
        found.extend(_wrong_forks(shadow, nobody, other))
    else:
        text = f"fork({some!r}, {other!r}, 1), which is not declared,"
        found.append(Mistake(text, Law.ABILITIES, (Exception,), lambda: subject.fork(some, other, 1)))
        text = f"extend({some!r}, 1), which is not declared,"
        found.append(Mistake(text, Law.ABILITIES, (Exception,), lambda: subject.extend(some, 1, [])))
        text = f"refork([{some!r}], [0], 1), which is not declared,"
        found.append(Mistake(text, Law.ABILITIES, (Exception,), lambda: subject.refork([some], [0], 1, [])))
    if Ability.SWAP in shadow.subject.abilities:
        found.extend(_wrong_swaps(shadow, nobody))
    else:
        text = f"([{some!r}]), which is not declared,"
        found.append(Mistake(f"swap_out{text}", Law.ABILITIES, (Exception,), lambda: subject.swap_out([some])))
        found.append(Mistake(f"swap_in{text}", Law.ABILITIES, (Exception,), lambda: subject.swap_in([some])))
    return found


def _wrong_swaps(shadow: Shadow, nobody: Key) -> Iterator[Mistake]:
    """Of somebody who is out no more may be asked than ``free``; only they come back."""
    subject = shadow.subject.allocator
    live, out = shadow.keys(), [key for group in shadow.out for key in group.keys]
    for keys in [[nobody], [*live, nobody], *([key] for key in out[:1])]:
        text = f"swap_out({keys}), {keys[-1]!r} holding nothing in the pool,"
        yield Mistake(text, Law.ERRORS, (KeyError,), partial(subject.swap_out, keys))
    for keys in [[nobody], *([*group.keys, nobody] for group in shadow.out[:1]), *([key] for key in live[:1])]:
        text = f"swap_in({keys}), {keys[-1]!r} not being out,"
        yield Mistake(text, Law.ERRORS, (KeyError, AllocationError), partial(subject.swap_in, keys))
    for key in out[:1]:
        held = (ValueError, AllocationError)
        yield Mistake(f"allocate({key!r}, 1), which is out,", Law.ERRORS, held, partial(subject.allocate, key, 1))
        if Ability.GROW in shadow.subject.abilities:
            text, raises = f"append([{key!r}]), which is out,", (KeyError, AllocationError)
            yield Mistake(text, Law.ERRORS, raises, partial(subject.append, [key], []))
        if Ability.FORK in shadow.subject.abilities:
            for seq in shadow.live[:1]:
                text = f"fork({seq.key!r}, {key!r}, 1), whose child is out,"
                yield Mistake(text, Law.ERRORS, (ValueError,), partial(subject.fork, seq.key, key, 1))


def _wrong_forks(shadow: Shadow, nobody: Key, other: Key) -> Iterator[Mistake]:
    extend = partial(shadow.subject.allocator.extend, nobody, 1, [])
    yield Mistake(f"extend({nobody!r}, 1)", Law.ERRORS, (KeyError,), extend)
    some = shadow.live[0].key if shadow.live else other
    for keys in ([some, nobody], [nobody, some]):
        refork = partial(shadow.subject.allocator.refork, keys, [0, 0], 1, [])
        yield Mistake(f"refork({keys}, [0, 0], 1), {nobody!r} holding nothing,", Law.ERRORS, (KeyError,), refork)
    wrong: list[tuple[Key, Key, int, type[Exception]]] = [(nobody, other, 1, KeyError)]
    for seq in shadow.live[:1] + shadow.live[-1:]:
        wrong.append((seq.key, other, 0, ValueError))
        wrong.append((seq.key, other, len(shadow.subject.slots(seq.key)) + 1, ValueError))
        wrong.append((seq.key, shadow.live[0].key, len(seq.tokens), ValueError))
    for parent, child, length, raises in wrong:
        text = f"fork({parent!r}, {child!r}, {length})"
        yield Mistake(text, Law.ERRORS, (raises,), partial(shadow.subject.allocator.fork, parent, child, length))

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
    return found


def _wrong_forks(shadow: Shadow, nobody: Key, other: Key) -> Iterator[Mistake]:
    wrong: list[tuple[Key, Key, int, type[Exception]]] = [(nobody, other, 1, KeyError)]
    for seq in shadow.live[:1] + shadow.live[-1:]:
        wrong.append((seq.key, other, 0, ValueError))
        wrong.append((seq.key, other, len(shadow.subject.slots(seq.key)) + 1, ValueError))
        wrong.append((seq.key, shadow.live[0].key, len(seq.tokens), ValueError))
    for parent, child, length, raises in wrong:
        text = f"fork({parent!r}, {child!r}, {length})"
        yield Mistake(text, Law.ERRORS, (raises,), partial(shadow.subject.allocator.fork, parent, child, length))

"""The conformance state machine: hypothesis invents calls, the shadow judges them, failures shrink to a few calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvbench.allocators.base import Ability, Allocator
from kvbench.testing.laws import Broken, Law
from kvbench.testing.mistakes import mistakes
from kvbench.testing.shadow import Group, Shadow, Tracked, survivors

PICK = st.integers(0, 63)
# A size within two granules (2), half the pool (1), or the pool and a granule more (0); and which.
SIZE = st.tuples(st.sampled_from([2, 2, 2, 1, 0]), st.integers(0, 4095))
VERB = st.sampled_from(["free", "allocate", "append", "fork", "refork", "extend", "swap_out", "swap_in"])
ORDER = st.sampled_from(["oldest first", "newest first", "every other"])


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls to one allocator, with every law of ``kvbench.testing.laws`` checked after each.

    Name your allocator in a subclass and give its ``TestCase`` to pytest or unittest::

        class MyMachine(AllocatorMachine):
            @staticmethod
            def build() -> Allocator:
                return MyAllocator(num_slots=61, block_size=4)

        TestMyAllocator = MyMachine.TestCase

    Small pools find more: what matters happens when they are full.

    Attributes:
        build: makes a new allocator.
        waived: laws known to be broken; a run ends in silence where one of them breaks.
    """

    waived: ClassVar[frozenset[Law]] = frozenset()

    @staticmethod
    def build() -> Allocator:
        """A new allocator, the same every time."""
        raise NotImplementedError("AllocatorMachine: say in a subclass which allocator to build")

    def __init__(self) -> None:
        super().__init__()
        self._shadow: Shadow | None = Shadow(self.build)
        self._order = ""

    @initialize(order=ORDER, held=st.lists(st.tuples(SIZE, SIZE), max_size=6))
    def start(self, order: str, held: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        """A pool that is in use already, and how it will be emptied."""
        self._order = order
        for size, length in held:
            self.allocate(size, length)

    @rule(size=SIZE, length=SIZE, again=st.booleans())
    def allocate(self, size: tuple[int, int], length: tuple[int, int], again: bool = False) -> None:
        """A new sequence, or one that returns, with fewer tokens than the slots it asks for or as many."""
        slots = self._scaled(size)
        self._do(Shadow.allocate, slots - self._scaled(length) % slots, slots, again)

    @precondition(lambda self: self.has())
    @rule(seq=PICK, count=st.integers(1, 8))
    def write(self, seq: int, count: int) -> None:
        """Some tokens of one sequence."""
        self._do(Shadow.write, self._pick(seq), count)

    @precondition(lambda self: self.has(Ability.GROW))
    @rule(seqs=st.lists(PICK, min_size=1, max_size=4))
    def append(self, seqs: list[int]) -> None:
        """More room for some sequences."""
        self._do(Shadow.append, list(dict.fromkeys(self._pick(seq) for seq in seqs)))

    @precondition(lambda self: self.has(Ability.FORK))
    @rule(seq=PICK, writers=st.lists(st.sampled_from(["parent", "child"]), max_size=2, unique=True))
    def fork(self, seq: int, writers: list[str]) -> None:
        """A new sequence that shares another's tokens; one of the two writes on, or both, or none yet."""
        self._do(_fork, self._pick(seq), writers)

    @precondition(lambda self: self.has(Ability.FORK))
    @rule(seq=PICK, more=SIZE)
    def extend(self, seq: int, more: tuple[int, int]) -> None:
        """More room for a sequence that was forked."""
        self._do(_extend, self._pick(seq), self._scaled(more))

    @precondition(lambda self: self.has(Ability.FORK))
    @rule(prefix=PICK, more=SIZE, count=st.integers(1, 3))
    def begin_with(self, prefix: int, more: tuple[int, int], count: int) -> None:
        """New sequences that begin with the tokens of another."""
        self._do(_begin_with, self._pick(prefix), self._scaled(more), count)

    @precondition(lambda self: self.has(Ability.FORK | Ability.GROW))
    @rule(seq=PICK, count=st.integers(1, 3), parents=st.lists(PICK, min_size=4, max_size=4))
    def search(self, seq: int, count: int, parents: list[int]) -> None:
        """A step of a beam search: beams that do not survive go on from others; at first there may be one."""
        self._do(_search, self._pick(seq), count, parents)

    @precondition(lambda self: self.has(Ability.SWAP))
    @rule(seqs=st.lists(PICK, min_size=1, max_size=3))
    def swap_out(self, seqs: list[int]) -> None:
        """Some sequences leave for the host pool."""
        self._do(Shadow.swap_out, list(dict.fromkeys(self._pick(seq) for seq in seqs)))

    @precondition(lambda self: self.has(Ability.SWAP))
    @rule(seq=PICK)
    def swap_out_family(self, seq: int) -> None:
        """All that share with a sequence leave, right after one more was forked from it."""
        self._do(_swap_family, self._pick(seq))

    @precondition(lambda self: self.has_out())
    @rule(group=PICK, keep=st.integers(0, 3))
    def swap_in(self, group: int, keep: int) -> None:
        """Those who left together return."""
        if self._shadow:
            self._do(Shadow.swap_in, self._pick_group(group), keep * self._shadow.subject.block_size)

    @precondition(lambda self: self.has_out())
    @rule(group=PICK, seq=PICK)
    def free_out(self, group: int, seq: int) -> None:
        """A sequence ends while it is out."""
        seqs = self._pick_group(group).seqs
        self._do(Shadow.free_out, self._pick_group(group), seqs[seq % len(seqs)])

    @precondition(lambda self: self.has())
    @rule(seq=PICK)
    def free(self, seq: int) -> None:
        """A sequence ends."""
        self._do(Shadow.free, self._pick(seq))

    @precondition(lambda self: self.has())
    @rule(seq=PICK)
    def preempt(self, seq: int) -> None:
        """A sequence loses its memory, returns under its own key, and writes on."""
        self._do(Shadow.readmit, self._pick(seq))

    @precondition(lambda self: self.has())
    @rule()
    def step(self) -> None:
        """One step of a scheduler."""
        self._do(Shadow.step)

    @rule(size=SIZE, keep=st.integers(0, 5), count=st.sampled_from([1, 1, 2, 3, 6]))
    def probe(self, size: tuple[int, int], keep: int, count: int) -> None:
        """What ``can_allocate`` says, and whether it is so."""
        if self._shadow:
            self._do(Shadow.probe, self._scaled(size), keep * self._shadow.subject.block_size, count)

    @rule(keep=st.integers(0, 1))
    def probe_largest(self, keep: int) -> None:
        """The same, of what is said to be the largest grant possible."""
        if self._shadow:
            self._do(Shadow.probe_largest, keep * self._shadow.subject.block_size)

    @rule(verb=VERB, index=PICK, full=st.booleans())
    def mistake(self, verb: str, index: int, full: bool) -> None:
        """A call that must be refused."""
        for seq in self._shadow.live if self._shadow and full else ():
            self._do(Shadow.write, seq, seq.room)
        self._do(_make_mistake, verb, index)

    def teardown(self) -> None:
        """In the end everything is freed, in an order drawn at the start."""
        if self._shadow:
            live = self._shadow.live
            self._do(
                Shadow.drain,
                {"newest first": live[::-1], "every other": live[::2] + live[1::2]}.get(self._order, live.copy()),
            )

    def has(self, ability: Ability = Ability.NONE) -> bool:
        """Whether there is a live sequence, and an allocator that can do this."""
        return self._shadow is not None and bool(self._shadow.live) and ability in self._shadow.subject.abilities

    def has_out(self) -> bool:
        """Whether somebody is swapped out."""
        return self._shadow is not None and bool(self._shadow.out)

    def _pick_group(self, index: int) -> Group:
        assert self._shadow
        return self._shadow.out[index % len(self._shadow.out)]

    def _pick(self, index: int) -> Tracked:
        assert self._shadow
        return self._shadow.live[index % len(self._shadow.live)]

    def _scaled(self, size: tuple[int, int]) -> int:
        """Slots, from 1."""
        if not self._shadow:
            return 1
        scale, number = size
        pool, granule = self._shadow.subject.num_slots, self._shadow.subject.block_size
        return 1 + number % (pool + granule, max(1, pool // 2), 2 * granule)[scale]

    def _do(self, verb: Callable[..., object], *args: Any) -> None:
        shadow = self._shadow
        if shadow is None:
            return
        try:
            verb(shadow, *args)
        except Broken as broken:
            self._shadow = None
            if broken.law not in self.waived:
                raise


def _fork(shadow: Shadow, parent: Tracked, writers: list[str]) -> None:
    family = {"parent": parent, "child": shadow.fork(parent)}
    for writer in writers if Ability.GROW in shadow.subject.abilities else ():
        if shadow.append([family[writer]]):
            shadow.write(family[writer], 1)


def _extend(shadow: Shadow, seq: Tracked, more: int) -> None:
    if seq.room:
        seq = shadow.fork(seq)
    if shadow.extend(seq, len(seq.tokens) + more):
        shadow.write(seq, 1)


def _begin_with(shadow: Shadow, prefix: Tracked, more: int, count: int) -> None:
    for _ in range(count):
        if seq := shadow.begin_with(prefix, len(prefix.tokens) + more):
            shadow.write(seq, 1)


def _search(shadow: Shadow, seq: Tracked, count: int, parents: list[int]) -> None:
    beams = shadow.can_refork(seq)
    if len(beams) < 2:
        beams = [seq, *(shadow.fork(seq) for _ in range(count))]
        if not shadow.append(beams):
            return
        for beam in beams:
            shadow.write(beam, 1)
    shadow.refork(beams, survivors(parents, len(beams)))
    for beam in beams:
        shadow.write(beam, 1)


def _swap_family(shadow: Shadow, seq: Tracked) -> None:
    if Ability.FORK in shadow.subject.abilities:
        shadow.fork(seq)
    shadow.swap_out([other for other in shadow.live if other.family == seq.family])


def _make_mistake(shadow: Shadow, verb: str, index: int) -> None:
    possible = [mistake for mistake in mistakes(shadow) if mistake.verb == verb]
    shadow.subject.refuse(possible[index % len(possible)], shadow.keys())


def first_broken(
    build: Callable[[], Allocator],
    *,
    num_examples: int = 100,
    num_calls: int = 30,
    shrink: bool = True,
    waived: frozenset[Law] = frozenset(),
) -> Broken | None:
    """Run the machine, always with the same examples; the first law that breaks, or None.

    Args:
        build: makes a new allocator.
        num_examples: runs.
        num_calls: rules of each run.
        shrink: whether to look for the fewest calls that break it.
        waived: laws not to report.
    """
    machine = type("Machine", (AllocatorMachine,), {"build": staticmethod(build), "waived": waived})
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    chosen = settings(
        max_examples=num_examples,
        stateful_step_count=num_calls,
        derandomize=True,
        database=None,
        deadline=None,
        phases=phases,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except Broken as broken:
        return broken
    except Flaky as error:
        reason = f"the same run, repeated, went differently: {str(error).splitlines()[0]}"
        return Broken(Law.DETERMINISM, reason, ())
    return None

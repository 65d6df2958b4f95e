from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.allocators.base import Ability, AllocationError, Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.buddy_heap import BuddyHeap
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.core import BlockCopy, Fit, KvbenchError, Usage

OPT_13B_BLOCKS = 983  # of 16 slots: what an A100-40GB leaves beside OPT-13B


def blocks(allocator: Allocator, seq: str) -> list[int]:
    """The blocks of a sequence, from its slots."""
    size = allocator.block_size
    slots = allocator.slots(seq)
    assert slots == [slot for start in slots[::size] for slot in range(start, start + size)]
    return [slot // size for slot in slots[::size]]


# contiguous


def test_slabs_are_handed_out_from_the_lowest_and_reused_last_in_first_out() -> None:
    slabs = Contiguous(30, slab_len=7)
    assert [slabs.allocate(seq, 3) for seq in "ABCD"] == [7, 7, 7, 7]
    assert [slabs.slots(seq)[0] for seq in "ABCD"] == [0, 7, 14, 21]
    assert slabs.slots("B") == list(range(7, 14))
    assert slabs.usage() == Usage(used=28, free=2, largest_free=0)
    slabs.free("A")
    slabs.free("C")
    slabs.allocate("E", 7)
    slabs.allocate("F", 1)
    assert [slabs.slots(seq)[0] for seq in "EF"] == [14, 0]


def test_slabs_fit() -> None:
    slabs = Contiguous(21, slab_len=7)
    assert slabs.can_allocate(7) is Fit.OK
    assert slabs.can_allocate(8) is Fit.NEVER
    assert slabs.can_allocate(1, keep=14) is Fit.OK
    assert slabs.can_allocate(1, keep=21) is Fit.NEVER
    for seq in "AB":
        slabs.allocate(seq, 1)
    assert slabs.can_allocate(1, keep=7) is Fit.LATER
    with pytest.raises(AllocationError, match="1 slots short"):
        slabs.allocate("long", 8)
    slabs.allocate("C", 7)
    with pytest.raises(AllocationError, match="7 slots short"):
        slabs.allocate("D", 3)
    with pytest.raises(AllocationError, match="8 slots short"):
        slabs.allocate("long", 8)


# buddy


def test_buddy_pool_is_carved_greedily() -> None:
    heap = BuddyHeap(OPT_13B_BLOCKS, max_order=7)
    regions = {order: list(starts) for order, starts in enumerate(heap.free) if starts}
    assert {1 << order: len(starts) for order, starts in regions.items()} == {128: 7, 64: 1, 16: 1, 4: 1, 2: 1, 1: 1}
    assert regions == {7: [768, 640, 512, 384, 256, 128, 0], 6: [896], 4: [960], 2: [976], 1: [980], 0: [982]}


def test_buddy_takes_the_smallest_sufficient_region_and_keeps_its_lower_half() -> None:
    buddy = Buddy(OPT_13B_BLOCKS * 16)
    assert buddy.usage() == Usage(0, 15728, 2048)
    for seq, slots, granted, first_block in [
        ("A", 2048, 2048, 0),  # a whole region, the lowest
        ("B", 1025, 2048, 128),  # rounded up to the next power of two
        ("C", 16, 16, 982),  # the single block
        ("D", 1, 16, 980),  # the pair, split
        ("E", 17, 32, 976),  # the four, split
        ("F", 16, 16, 981),  # the other half of the pair
        ("G", 100, 128, 960),  # of the sixteen
        ("H", 300, 512, 896),  # of the sixty-four
    ]:
        assert buddy.allocate(seq, slots) == granted, seq
        assert buddy.slots(seq) == list(range(first_block * 16, first_block * 16 + granted)), seq
    assert buddy.usage().used == 2048 + 2048 + 16 + 16 + 32 + 16 + 128 + 512
    assert buddy.usage().largest_free == 2048
    for seq in "GDAFHCEB":
        buddy.free(seq)
    assert {order: set(starts) for order, starts in enumerate(buddy.heap.free) if starts} == {
        order: set(starts) for order, starts in enumerate(BuddyHeap(OPT_13B_BLOCKS, 7).free) if starts
    }


def test_buddy_reuses_the_region_freed_last() -> None:
    buddy = Buddy(64 * 16, region_len=256)
    for seq in "ABCD":
        buddy.allocate(seq, 256)
    assert [blocks(buddy, seq)[0] for seq in "ABCD"] == [0, 16, 32, 48]
    for seq in "BDA":
        buddy.free(seq)
    for seq in "EFG":
        buddy.allocate(seq, 256)
    assert [blocks(buddy, seq)[0] for seq in "EFG"] == [0, 48, 16]


def test_buddies_merge_and_neighbours_that_are_none_do_not() -> None:
    buddy = Buddy(8, block_size=1, region_len=8)
    for seq in "ABCDEFGH":
        buddy.allocate(seq, 1)
    assert [buddy.slots(seq) for seq in "ABCDEFGH"] == [[slot] for slot in range(8)]
    for seq, largest in [("B", 1), ("C", 1), ("D", 2), ("A", 4), ("E", 4), ("G", 4), ("H", 4), ("F", 8)]:
        buddy.free(seq)
        assert buddy.usage().largest_free == largest, seq


def test_buddy_fit() -> None:
    buddy = Buddy(23 * 16, region_len=256)  # 16, 4, 2, 1 blocks
    assert buddy.can_allocate(256) is Fit.OK
    assert buddy.can_allocate(257) is Fit.NEVER
    assert buddy.can_allocate(256, keep=7 * 16) is Fit.OK
    assert buddy.can_allocate(256, keep=8 * 16) is Fit.NEVER
    assert buddy.can_allocate(129, keep=8 * 16) is Fit.NEVER  # it would be rounded to 256
    buddy.allocate("A", 200)
    assert buddy.can_allocate(65) is Fit.LATER  # 112 slots are free, at most 64 in one region
    assert buddy.can_allocate(64, keep=48) is Fit.OK
    assert buddy.can_allocate(64, keep=64) is Fit.LATER
    with pytest.raises(AllocationError) as short:
        buddy.allocate("B", 65)
    assert short.value.shortage == 128


# first fit


def test_first_fit_takes_the_lowest_hole_that_is_large_enough() -> None:
    first_fit = FirstFit(30)
    for seq, slots in [("A", 5), ("B", 3), ("C", 7), ("D", 2), ("E", 4)]:
        assert first_fit.allocate(seq, slots) == slots
    assert [first_fit.slots(seq)[0] for seq in "ABCDE"] == [0, 5, 8, 15, 17]
    for seq in "ACE":
        first_fit.free(seq)  # holes 0-4, 8-14, 17-29
    assert first_fit.usage() == Usage(used=5, free=25, largest_free=13)
    first_fit.allocate("F", 6)
    assert first_fit.slots("F") == [8, 9, 10, 11, 12, 13]  # the first hole is too small; cut from the front
    first_fit.allocate("G", 5)
    assert first_fit.slots("G") == [0, 1, 2, 3, 4]  # a hole of that very size
    with pytest.raises(AllocationError, match="1 slots short"):
        first_fit.allocate("H", 14)


@pytest.mark.parametrize(
    ("order", "largest"),
    [
        ("ACB", [10, 10, 30]),  # both neighbours free
        ("ABC", [10, 20, 30]),  # the one before
        ("CBA", [10, 20, 30]),  # the one after
        ("BDA", [10, 10, 20]),
        ("DCE", [10, 20, 30]),
    ],
)
def test_first_fit_merges_with_both_neighbours(order: str, largest: list[int]) -> None:
    first_fit = FirstFit(50)
    for seq in "ABCDE":
        first_fit.allocate(seq, 10)
    assert first_fit.usage().largest_free == 0
    for seq, expected in zip(order, largest, strict=True):
        first_fit.free(seq)
        assert first_fit.usage().largest_free == expected


def test_first_fit_fit() -> None:
    first_fit = FirstFit(20, block_size=4)
    for seq in "ABCDE":
        first_fit.allocate(seq, 3)
    for seq in "BD":
        first_fit.free(seq)
    assert first_fit.can_allocate(4, keep=4) is Fit.OK
    assert first_fit.can_allocate(5) is Fit.LATER  # eight free slots, four in one piece
    assert first_fit.can_allocate(4, keep=8) is Fit.LATER
    assert first_fit.can_allocate(16, keep=4) is Fit.LATER
    assert first_fit.can_allocate(17, keep=4) is Fit.NEVER
    assert first_fit.can_allocate(21) is Fit.NEVER


# paged


def test_paged_reuses_the_block_freed_last() -> None:
    paged = Paged(40, block_size=4)
    assert paged.allocate("A", 9) == 12
    assert paged.allocate("B", 4) == 4
    assert (blocks(paged, "A"), blocks(paged, "B")) == ([0, 1, 2], [3])
    paged.free("A")
    paged.allocate("C", 8)
    assert blocks(paged, "C") == [2, 1]
    assert paged.append({"C": None, "B": None}, []) == 4
    assert (blocks(paged, "C"), blocks(paged, "B")) == ([2, 1, 0], [3, 4])
    assert paged.usage() == Usage(used=20, free=20, largest_free=20)


def test_paged_fit_and_shortage() -> None:
    paged = Paged(43, block_size=4)  # ten blocks and three slots that nobody gets
    assert paged.can_allocate(40) is Fit.OK
    assert paged.can_allocate(41) is Fit.NEVER
    assert paged.can_allocate(36, keep=4) is Fit.OK
    assert paged.can_allocate(37, keep=4) is Fit.NEVER
    paged.allocate("A", 32)
    assert paged.usage() == Usage(used=32, free=11, largest_free=8)
    assert paged.can_allocate(9) is Fit.LATER
    assert paged.can_allocate(8, keep=4) is Fit.LATER
    with pytest.raises(AllocationError, match="12 slots short"):
        paged.allocate("B", 20)
    for seq in "BC":
        paged.allocate(seq, 4)
    assert not paged.can_append(1)
    with pytest.raises(AllocationError, match="8 slots short"):
        paged.append(["A", "B"], [])


def test_two_samples_share_the_prompt_until_one_writes() -> None:
    """The PagedAttention paper's Figure 8: blocks of 4, a prompt of 7 tokens, one copy-on-write."""
    paged = Paged(64, block_size=4)
    paged.allocate("A1", 7)
    paged.fork("A1", "A2", 7)
    assert blocks(paged, "A1") == blocks(paged, "A2") == [0, 1]
    assert [paged.pool.num_holders(block) for block in (0, 1)] == [2, 2]
    assert paged.usage().used == 8

    copies: list[BlockCopy] = []
    assert paged.append(["A1"], copies) == 1
    assert copies == [BlockCopy(src=4, dst=8, num_slots=3)]
    assert (blocks(paged, "A1"), blocks(paged, "A2")) == ([0, 2], [0, 1])
    assert [paged.pool.num_holders(block) for block in (0, 1, 2)] == [2, 1, 1]

    assert paged.append(["A2"], copies) == 1
    assert len(copies) == 1  # it has the block to itself now
    assert blocks(paged, "A2") == [0, 1]
    assert paged.usage().used == 12

    paged.free("A1")
    assert paged.usage().used == 8
    paged.free("A2")
    assert paged.usage() == Usage(0, 64, 64)


def test_all_samples_write_in_one_call() -> None:
    paged = Paged(64, block_size=4)
    paged.allocate("A", 6)
    for child in ("B", "C"):
        paged.fork("A", child, 6)
    copies: list[BlockCopy] = []
    assert paged.append(["A", "B", "C"], copies) == 2
    assert copies == [BlockCopy(4, 8, 2), BlockCopy(4, 12, 2)]
    assert [blocks(paged, seq) for seq in "ABC"] == [[0, 2], [0, 3], [0, 1]]


def test_shared_full_block_is_not_copied() -> None:
    paged = Paged(64, block_size=4)
    paged.allocate("A", 8)
    paged.fork("A", "B", 8)
    copies: list[BlockCopy] = []
    assert paged.append(["A", "B"], copies) == 4
    assert copies == []
    assert (blocks(paged, "A"), blocks(paged, "B")) == ([0, 1, 2], [0, 1, 3])


def test_copies_that_do_not_fit_leave_everything() -> None:
    paged = Paged(16, block_size=4)
    paged.allocate("A", 7)
    for child in ("B", "C", "D"):
        paged.fork("A", child, 7)
    copies: list[BlockCopy] = []
    with pytest.raises(AllocationError, match="4 slots short"):  # three copies, two free blocks
        paged.append(["A", "B", "C", "D"], copies)
    assert copies == []
    assert paged.append(["A", "B", "C"][:2], copies) == 1
    assert paged.usage().largest_free == 0
    assert paged.pool.num_holders(1) == 2


def test_fork_of_a_sequence_with_reserved_blocks_leaves_them_to_the_parent() -> None:
    paged = Paged(64, block_size=4)
    paged.allocate("A", 16)
    paged.fork("A", "B", 6)
    assert (blocks(paged, "A"), blocks(paged, "B")) == ([0, 1, 2, 3], [0, 1])
    copies: list[BlockCopy] = []
    assert paged.append(["A"], copies) == 10  # two in the copied block, eight in its own
    assert copies == [BlockCopy(4, 16, 2)]
    assert blocks(paged, "A") == [0, 4, 2, 3]
    assert paged.append(["B"], copies) == 2
    assert len(copies) == 1


def test_beams_move_without_a_free_block() -> None:
    paged = Paged(20, block_size=4)
    paged.allocate("A", 8)
    for child in ("B", "C"):
        paged.fork("A", child, 8)
    copies: list[BlockCopy] = []
    paged.append(["A", "B", "C"], copies)
    assert [blocks(paged, seq) for seq in "ABC"] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    paged.refork(["A", "B", "C"], [0, 0, 2], 10, copies)
    assert copies == [BlockCopy(8, 12, 2)]  # nothing full differs, so no table changes
    assert [blocks(paged, seq) for seq in "ABC"] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    paged.refork(["A", "B", "C"], [2, 1, 2], 12, copies)
    assert len(copies) == 1
    assert [blocks(paged, seq) for seq in "ABC"] == [[0, 1, 4], [0, 1, 3], [0, 1, 4]]
    assert paged.usage() == Usage(16, 4, 4, shared=20)


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_moving_beams_is_freeing_forking_and_copying(block_size: int, width: int, data: st.DataObject) -> None:
    """The short way and the long way lead to the same sharing, and copy as much."""
    short, long = (Paged(1024, block_size) for _ in range(2))
    length = data.draw(st.integers(1, 9))
    streams = list(range(width))
    for paged in (short, long):
        paged.allocate(0, length)
        for child in streams[1:]:
            paged.fork(0, child, length)
    copies: tuple[list[BlockCopy], list[BlockCopy]] = [], []
    for step in range(length, length + 10):
        for paged, copied in zip((short, long), copies, strict=True):
            if step == length or step % block_size == 0:
                paged.append(streams, copied)
        parents = [data.draw(st.integers(0, width - 1)) for _ in streams]
        parents = [i if i in parents else parent for i, parent in enumerate(parents)]
        short.refork(streams, parents, step + 1, copies[0])
        moved = [(parent, i) for i, parent in enumerate(parents) if parent != i]
        for _, child in moved:
            long.free(child)
        for parent, child in moved:
            long.fork(parent, child, step + 1)
        if moved and (step + 1) % block_size:
            long.append(dict.fromkeys(stream for pair in moved for stream in pair), copies[1])
        pattern = [[row.index(block) for block in row] for row in zip(*map(short.tables.get, streams), strict=True)]
        assert pattern == [
            [row.index(block) for block in row] for row in zip(*map(long.tables.get, streams), strict=True)
        ]
        assert short.usage() == long.usage()
        assert sum(copy.num_slots for copy in copies[0]) == sum(copy.num_slots for copy in copies[1])


def test_room_beyond_the_smallest_is_not_lost() -> None:
    """Told 1 because of the other, a sequence fills the block it got before it is given another."""
    paged = Paged(64, block_size=4)
    paged.allocate("A", 4)
    paged.allocate("B", 7)
    paged.fork("B", "C", 7)
    assert paged.append(["A", "B"], []) == 1
    assert paged.append(["A"], []) == 3
    assert len(blocks(paged, "A")) == 2
    paged.fork("A", "D", 8)
    assert paged.append(["A"], []) == 4
    assert len(blocks(paged, "A")) == 3


def test_preempted_fork_returns_as_if_new() -> None:
    paged = Paged(64, block_size=4)
    paged.allocate("A", 6)
    paged.fork("A", "B", 6)
    paged.free("B")
    paged.allocate("B", 8)
    assert paged.append(["B"], []) == 4
    assert len(blocks(paged, "B")) == 3


def test_failed_append_leaves_the_free_blocks_in_their_order() -> None:
    paged = Paged(64, block_size=4)
    for seq in "AB":
        paged.allocate(seq, 4)
    with pytest.raises(KeyError):
        paged.append(["A", "B", "gone"], [])
    paged.append(["A"], [])
    assert blocks(paged, "A") == [0, 2]


# several at once


def test_several_fit_only_side_by_side() -> None:
    slabs, buddy, first_fit = Contiguous(21, slab_len=7), Buddy(16, 1, 8), FirstFit(20)
    for allocator in (slabs, buddy, first_fit):
        allocator.allocate("A", 5)
    assert [slabs.can_allocate(3, 0, count) for count in (2, 3, 4)] == [Fit.OK, Fit.LATER, Fit.NEVER]
    assert [slabs.can_allocate(3, 7, count) for count in (1, 2, 3)] == [Fit.OK, Fit.LATER, Fit.NEVER]
    assert [buddy.can_allocate(4, 0, count) for count in (2, 3, 4, 5)] == [Fit.OK, Fit.LATER, Fit.LATER, Fit.NEVER]
    assert buddy.can_allocate(3, 1, 2) is Fit.LATER  # eight free slots, all of them used
    assert [first_fit.can_allocate(5, 0, count) for count in (3, 4, 5)] == [Fit.OK, Fit.LATER, Fit.NEVER]
    for seq, slots in (("B", 5), ("C", 2), ("D", 5)):
        first_fit.allocate(seq, slots)
    first_fit.free("B")  # holes of five and three
    assert [first_fit.can_allocate(3, 0, count) for count in (2, 3)] == [Fit.OK, Fit.LATER]
    assert [first_fit.can_allocate(4, 0, count) for count in (1, 2)] == [Fit.OK, Fit.LATER]
    assert first_fit.can_allocate(3, 3, 2) is Fit.LATER


def test_several_in_pages_take_whole_blocks_each() -> None:
    paged = Paged(40, block_size=4)
    assert [paged.can_allocate(5, 0, count) for count in (5, 6)] == [Fit.OK, Fit.NEVER]
    assert paged.can_allocate(5, 4, 5) is Fit.NEVER
    paged.allocate("A", 1)
    assert [paged.can_allocate(5, 4, count) for count in (4, 5)] == [Fit.OK, Fit.NEVER]
    assert [paged.can_allocate(5, 0, count) for count in (4, 5)] == [Fit.OK, Fit.LATER]


# extend


def test_extended_fork_copies_the_block_it_writes_to() -> None:
    """A prompt with a shared prefix of 6 tokens: its second block is copied, then it has what it asked for."""
    paged = Paged(64, block_size=4)
    paged.allocate("prefix", 6)
    copies: list[BlockCopy] = []
    for seq in "AB":
        paged.fork("prefix", seq, 6)
        assert paged.extend(seq, 11, copies) == 12
    assert copies == [BlockCopy(4, 12, 2), BlockCopy(4, 20, 2)]
    assert [blocks(paged, seq) for seq in ("prefix", "A", "B")] == [[0, 1], [0, 3, 2], [0, 5, 4]]
    assert paged.usage() == Usage(24, 40, 40, shared=8)
    assert paged.append(["A"], copies) == 4


def test_extended_fork_of_whole_blocks_copies_nothing() -> None:
    paged = Paged(24, block_size=4)
    paged.allocate("prefix", 8)
    paged.fork("prefix", "A", 8)
    copies: list[BlockCopy] = []
    with pytest.raises(AllocationError, match="4 slots short"):
        paged.extend("A", 25 + 3, copies)
    assert paged.extend("A", 9, copies) == 12
    assert (copies, blocks(paged, "A")) == ([], [0, 1, 2])


# swap


def test_swap_moves_a_shared_block_once_and_brings_it_back_shared() -> None:
    paged = Paged(40, block_size=4)
    paged.allocate("A", 6)
    paged.fork("A", "B", 6)
    paged.append(["B"], [])
    assert [blocks(paged, seq) for seq in "AB"] == [[0, 1], [0, 2]]
    assert paged.swap_out(["A", "B"]) == [BlockCopy(0, 0, 4), BlockCopy(4, 4, 4), BlockCopy(8, 8, 4)]
    assert paged.usage() == Usage(0, 40, 40, swapped=12)
    for slots in (24, 4):
        paged.allocate(slots, slots)
    assert paged.can_swap_in(["A", "B"])
    assert not paged.can_swap_in(["A", "B"], keep=4)
    moves = paged.swap_in(["A", "B"])
    assert [(move.src, move.num_slots) for move in moves] == [(0, 4), (4, 4), (8, 4)]
    assert [blocks(paged, seq) for seq in "AB"] == [
        [move.dst // 4 for move in moves[:2]],
        [moves[0].dst // 4, moves[2].dst // 4],
    ]
    assert paged.usage() == Usage(40, 0, 0, shared=4)


def test_swapped_between_fork_and_copy_the_copy_comes_after() -> None:
    paged = Paged(40, block_size=4)
    paged.allocate("A", 6)
    for child in "BC":
        paged.fork("A", child, 6)
    paged.swap_out(["A", "B", "C"])
    paged.swap_in(["A", "B", "C"])
    copies: list[BlockCopy] = []
    assert paged.append(["A", "B", "C"], copies) == 2
    assert [copy.num_slots for copy in copies] == [2, 2]
    assert len({blocks(paged, seq)[1] for seq in "ABC"}) == 3


def test_what_others_hold_stays() -> None:
    paged = Paged(40, block_size=4)
    paged.allocate("A", 6)
    paged.fork("A", "B", 6)
    paged.append(["A"], [])
    assert paged.swap_out(["A"]) == [BlockCopy(8, 0, 4)]
    assert paged.usage() == Usage(8, 32, 32, shared=4, swapped=4)
    paged.free("B")
    assert paged.usage() == Usage(4, 36, 36, swapped=4)
    paged.free("A")
    assert paged.usage() == Usage(0, 40, 40)


def test_full_host_pool_refuses() -> None:
    paged = Paged(40, block_size=4, host_slots=10)  # two blocks and two slots that nobody gets
    paged.allocate("A", 4)
    paged.allocate("B", 8)
    paged.swap_out(["A"])
    with pytest.raises(AllocationError, match="4 slots short"):
        paged.swap_out(["B"])
    assert paged.usage() == Usage(8, 32, 32, swapped=4)
    paged.free("A")
    assert paged.swap_out(["B"]) == [BlockCopy(4, 0, 4), BlockCopy(8, 4, 4)]


def test_wrong_swaps() -> None:
    paged = Paged(40, block_size=4)
    for seq in "AB":
        paged.allocate(seq, 4)
    with pytest.raises(KeyError):
        paged.swap_in(["A"])
    paged.swap_out(["A"])
    for call in (lambda: paged.swap_out(["B", "A"]), lambda: paged.append(["A"], []), lambda: paged.slots("A")):
        with pytest.raises(KeyError):
            call()
    with pytest.raises(ValueError, match="'A' holds slots already"):
        paged.fork("B", "A", 4)
    with pytest.raises(ValueError, match="'A' holds slots already"):
        paged.allocate("A", 4)
    assert paged.usage() == Usage(4, 36, 36, swapped=4)
    with pytest.raises(KvbenchError, match="there is no host pool; give swap_space_bytes= of a block or more"):
        Paged(40, 4, host_slots=3).swap_out([])


# what all have in common

KINDS: dict[str, Callable[[], Allocator]] = {
    "contiguous": lambda: Contiguous(32, 16),
    "buddy": lambda: Buddy(32, 16),
    "first_fit": lambda: FirstFit(32, 16),
    "paged": lambda: Paged(32, 16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes(kind: str) -> None:
    allocator = KINDS[kind]()
    allocator.allocate("A", 9)
    with pytest.raises(ValueError, match="'A' holds slots already"):
        allocator.allocate("A", 1)
    with pytest.raises(ValueError, match="slots=0: at least 1"):
        allocator.allocate("B", 0)
    with pytest.raises(KeyError):
        allocator.free("B")
    with pytest.raises(KeyError):
        allocator.slots("B")
    if Ability.GROW not in allocator.abilities:
        assert not allocator.can_append(1)
        with pytest.raises(AllocationError):
            allocator.append(["A"], [])
    if Ability.FORK not in allocator.abilities:
        with pytest.raises(KvbenchError, match=f"allocator={kind} shares no slots; use allocator=paged"):
            allocator.fork("A", "B", 9)
        with pytest.raises(KvbenchError, match=f"allocator={kind} shares no slots; use allocator=paged"):
            allocator.extend("A", 20, [])
    if Ability.SWAP not in allocator.abilities:
        for verb in (allocator.swap_out, allocator.swap_in):
            with pytest.raises(KvbenchError, match=f"allocator={kind} does not swap; use allocator=paged"):
                verb(["A"])
        assert not allocator.can_swap_in(["A"])
    assert allocator.usage() == Usage(16, 16, 16)


def test_wrong_forks() -> None:
    paged = Paged(32, 4)
    paged.allocate("A", 6)
    paged.allocate("B", 6)
    with pytest.raises(KeyError):
        paged.fork("C", "D", 1)
    with pytest.raises(ValueError, match="'B' holds slots already"):
        paged.fork("A", "B", 6)
    for length in (0, 9):
        with pytest.raises(ValueError, match=f"length={length} is not within the 8 slots of 'A'"):
            paged.fork("A", "C", length)
    with pytest.raises(KvbenchError, match=r"copy_on_write=false: .* set allocator\.copy_on_write=true"):
        Paged(32, 4, copy_on_write=False).fork("A", "B", 1)
    with pytest.raises(KvbenchError, match=r"copy_on_write=false: .* set allocator\.copy_on_write=true"):
        Paged(32, 4, copy_on_write=False).extend("A", 1, [])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Contiguous(100, 101), "allocator.slab_len=101 does not fit the pool of 100 slots; give 1 to 100"),
        (lambda: Contiguous(100, 0), "allocator.slab_len=0 does not fit the pool of 100 slots; give 1 to 100"),
        (lambda: Buddy(100, 0), "allocator.block_size=0 does not fit the pool of 100 slots; give 1 to 100"),
        (lambda: Buddy(100, 16, 8), "allocator.region_len=8 is shorter than a block of 16; give at least that"),
        (lambda: FirstFit(100, 101), "allocator.block_size=101 does not fit the pool of 100 slots; give 1 to 100"),
        (lambda: Paged(100, 0), "allocator.block_size=0: a block holds at least 1 slot; give 1 or more"),
        (lambda: Paged(100, 101), "allocator.block_size=101 is larger than the pool of 100 slots; give at most that"),
    ],
)
def test_impossible_pools(build: Callable[[], Allocator], message: str) -> None:
    with pytest.raises(KvbenchError) as error:
        build()
    assert str(error.value) == message


# slow and obvious references


class EverySlot:
    """First fit that looks at every granule, one by one."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.size = block_size
        self.owner: list[str | None] = [None] * (num_slots // block_size)

    def find(self, slots: int) -> int | None:
        need = -(-slots // self.size)
        for start in range(len(self.owner) - need + 1):
            if all(owner is None for owner in self.owner[start : start + need]):
                return start
        return None

    def take(self, seq: str, slots: int, start: int) -> list[int]:
        need = -(-slots // self.size)
        self.owner[start : start + need] = [seq] * need
        return list(range(start * self.size, (start + need) * self.size))

    def free(self, seq: str) -> None:
        self.owner = [None if owner == seq else owner for owner in self.owner]

    def largest(self) -> int:
        return max(
            (n * self.size for n in range(1, len(self.owner) + 1) if self.find(n * self.size) is not None), default=0
        )


class RegionList:
    """Buddies as one list of free regions (start, order), the newest last."""

    def __init__(self, num_blocks: int, max_order: int) -> None:
        self.regions: list[tuple[int, int]] = []
        start = 0
        for order in range(max_order, -1, -1):
            while num_blocks - start >= 1 << order:
                self.regions.insert(0, (start, order))
                start += 1 << order
        self.largest = max(order for _, order in self.regions)

    def take(self, order: int) -> int | None:
        enough = [region[1] for region in self.regions if region[1] >= order]
        if not enough:
            return None
        index = max(i for i, region in enumerate(self.regions) if region[1] == min(enough))
        start, available = self.regions.pop(index)
        for smaller in range(available - 1, order - 1, -1):
            self.regions.append((start + (1 << smaller), smaller))
        return start

    def free(self, start: int, order: int) -> None:
        while order < self.largest and (start ^ (1 << order), order) in self.regions:
            self.regions.remove((start ^ (1 << order), order))
            start &= ~(1 << order)
            order += 1
        self.regions.append((start, order))


@pytest.mark.parametrize(("num_slots", "block_size"), [(40, 1), (61, 4), (130, 16)])
def test_first_fit_agrees_with_looking_at_every_slot(num_slots: int, block_size: int) -> None:
    random = Random(num_slots)
    for _ in range(8):
        first_fit, reference = FirstFit(num_slots, block_size), EverySlot(num_slots, block_size)
        live: list[str] = []
        for number in range(150):
            if live and random.random() < 0.45:
                seq = live.pop(random.randrange(len(live)))
                first_fit.free(seq)
                reference.free(seq)
            slots = random.randint(1, num_slots // random.choice([1, 3, 8]))
            start = reference.find(slots)
            assert (first_fit.can_allocate(slots) is Fit.OK) == (start is not None)
            if start is not None:
                seq = f"s{number}"
                live.append(seq)
                first_fit.allocate(seq, slots)
                assert first_fit.slots(seq) == reference.take(seq, slots, start)
            used = sum(owner is not None for owner in reference.owner) * block_size
            assert first_fit.usage() == Usage(used, num_slots - used, reference.largest())


@pytest.mark.parametrize(("num_blocks", "max_order"), [(23, 3), (64, 6), (61, 4), (OPT_13B_BLOCKS, 7)])
def test_buddy_agrees_with_a_list_of_regions(num_blocks: int, max_order: int) -> None:
    random = Random(num_blocks)
    for _ in range(8):
        buddy, reference = Buddy(num_blocks * 2, 2, 2 << max_order), RegionList(num_blocks, max_order)
        live: list[tuple[str, int, int]] = []
        for number in range(200):
            if live and random.random() < 0.45:
                seq, start, order = live.pop(random.randrange(len(live)))
                buddy.free(seq)
                reference.free(start, order)
            order = random.randint(0, max_order)
            slots = random.randint((1 << order) + 1, 2 << order) if order else random.randint(1, 2)
            fits = buddy.can_allocate(slots) is Fit.OK
            expected = reference.take(order)
            assert fits == (expected is not None)
            if expected is not None:
                seq = f"s{number}"
                assert buddy.allocate(seq, slots) == 2 << order
                assert blocks(buddy, seq) == list(range(expected, expected + (1 << order)))
                live.append((seq, expected, order))
            used = sum(2 << order for _, _, order in live)
            largest = max((2 << order for _, order in reference.regions), default=0)
            assert buddy.usage() == Usage(used, num_blocks * 2 - used, largest)

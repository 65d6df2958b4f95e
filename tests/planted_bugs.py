"""Allocators with one bug each, and the laws by which the conformance suite may notice it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from random import Random

from kvbench.allocators.base import Ability, AllocationError, Allocator
from kvbench.allocators.buddy import Buddy
from kvbench.allocators.contiguous import Contiguous
from kvbench.allocators.first_fit import FirstFit
from kvbench.allocators.paged import Paged
from kvbench.core import BlockCopy, Fit, Usage
from kvbench.testing import Law

Seqs = Collection[Hashable]
Copies = list[BlockCopy]


# memory that is lost or given twice


class LeakLastBlock(Paged):
    def free(self, seq: Hashable) -> None:
        if seq in self.tables:
            self.tables[seq] = self.tables[seq][:-1] or self.tables[seq]
        super().free(seq)


class LeakForkedFree(Paged):
    """Blocks that were shared once are never given back."""

    def free(self, seq: Hashable) -> None:
        table = self.tables.get(seq, [])
        shared = [block for block in table if self.pool.num_holders(block) == 2]
        super().free(seq)
        for block in shared:
            self.pool.shared[block] = 2


class DoubleFree(Paged):
    """Frees a shared block when its first holder goes."""

    def free(self, seq: Hashable) -> None:
        self.pool.free.extend(block for block in self.tables.get(seq, []) if self.pool.shared.pop(block, 0))
        super().free(seq)


class DoubleGrant(Paged):
    """Leaves the last of several granted blocks in the free list."""

    def allocate(self, seq: Hashable, slots: int) -> int:
        granted = super().allocate(seq, slots)
        if len(self.tables[seq]) > 2:
            self.pool.free.append(self.tables[seq][-1])
        return granted


class OverlappingSlabs(Contiguous):
    def slots(self, seq: Hashable) -> list[int]:
        base = self._bases[seq]
        return [slot - (base > 0) for slot in super().slots(seq)]


class SlabFreedTwice(Contiguous):
    """Forgets that a sequence has gone."""

    def free(self, seq: Hashable) -> None:
        self._free.append(self._bases[seq])


# coalescing


class BuddyNeverMerges(Buddy):
    def free(self, seq: Hashable) -> None:
        start, order = self._regions.pop(seq)
        self.heap.free[order][start] = None
        self.heap.num_free += 1 << order


class BuddyMergesOnce(Buddy):
    def free(self, seq: Hashable) -> None:
        start, order = self._regions.pop(seq)
        self.heap.num_free += 1 << order
        buddy = start ^ 1 << order
        if order < self.heap.largest_order and buddy in self.heap.free[order]:
            del self.heap.free[order][buddy]
            start, order = min(start, buddy), order + 1
        self.heap.free[order][start] = None


class BuddyMergesRight(Buddy):
    """Merges with the region after it, buddy or not."""

    def free(self, seq: Hashable) -> None:
        start, order = self._regions.pop(seq)
        self.heap.num_free += 1 << order
        while order < self.heap.largest_order and start + (1 << order) in self.heap.free[order]:
            del self.heap.free[order][start + (1 << order)]
            order += 1
        self.heap.free[order][start] = None


class FirstFitMergesLeftOnly(FirstFit):
    def free(self, seq: Hashable) -> None:
        start, size = self._extents[seq]
        after = next((hole for hole in self._holes if hole[0] == start + size), None)
        super().free(seq)
        if after:
            index = next(i for i, hole in enumerate(self._holes) if sum(hole) == sum(after))
            self._holes[index : index + 1] = [(self._holes[index][0], after[0] - self._holes[index][0]), after]
            self._changed(0)


class FirstFitMergesRightOnly(FirstFit):
    def free(self, seq: Hashable) -> None:
        start, _ = self._extents[seq]
        before = next((hole for hole in self._holes if sum(hole) == start), None)
        super().free(seq)
        if before:
            index = next(i for i, hole in enumerate(self._holes) if hole[0] == before[0])
            self._holes[index : index + 1] = [before, (start, sum(self._holes[index]) - start)]
            self._changed(0)


# errors


class AllocateKeepsPart(Paged):
    """A grant that does not fit keeps what it found."""

    def allocate(self, seq: Hashable, slots: int) -> int:
        try:
            return super().allocate(seq, slots)
        except AllocationError:
            if self.pool.free:
                self.pool.free.pop()
            raise


class AppendOneByOne(Paged):
    """Grants as many as it can, then raises."""

    def append(self, seqs: Seqs, copies: Copies) -> int:
        return min(Paged.append(self, [seq], copies) for seq in seqs)


class ErrorReordersFreeList(Paged):
    """Invisible at first: the blocks of a failed call come back in another order."""

    def allocate(self, seq: Hashable, slots: int) -> int:
        try:
            return super().allocate(seq, slots)
        except AllocationError:
            self.pool.free.reverse()
            raise


class ErrorLeavesCopies(Paged):
    def append(self, seqs: Seqs, copies: Copies) -> int:
        if len(seqs) > len(self.pool.free):
            copies.append(BlockCopy(0, self.block_size, 1))
        return super().append(seqs, copies)


class ForgivesDoubleFree(Paged):
    def free(self, seq: Hashable) -> None:
        if seq in self.tables or seq in self.swapped:
            super().free(seq)


class ReplacesOnSecondAllocate(Paged):
    def allocate(self, seq: Hashable, slots: int) -> int:
        if seq in self.tables:
            self.free(seq)
        return super().allocate(seq, slots)


class UntypedShortage(FirstFit):
    def allocate(self, seq: Hashable, slots: int) -> int:
        try:
            return super().allocate(seq, slots)
        except AllocationError as short:
            raise MemoryError(str(short)) from None


class ShortageTooSmall(Paged):
    def allocate(self, seq: Hashable, slots: int) -> int:
        try:
            return super().allocate(seq, slots)
        except AllocationError as short:
            raise AllocationError(short.shortage // self.block_size) from None


# copy-on-write


class ForkForgetsLastHolder(Paged):
    """The reference count of the last shared block is one too low."""

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        super().fork(parent, child, length)
        last = self.tables[child][-1]
        if self.pool.shared[last] == 2:
            del self.pool.shared[last]
        else:
            self.pool.shared[last] -= 1


class ThirdHolderNotCounted(Paged):
    """Whether a block is shared is remembered, but not by how many."""

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        super().fork(parent, child, length)
        self.pool.shared = dict.fromkeys(self.pool.shared, 2)


class ForkSharesTable(Paged):
    """Parent and child have one list for a block table."""

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        super().fork(parent, child, length)
        if self.tables[child] == self.tables[parent]:
            self.tables[child] = self.tables[parent]


class ForkTakesBlocks(Paged):
    """The child gets blocks of its own, and nothing in them."""

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        super().fork(parent, child, length)
        self.free(child)
        self.allocate(child, length)


class ForkReversesTable(Paged):
    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        super().fork(parent, child, length)
        self.tables[child].reverse()


class NoCopyOnWrite(Paged):
    """Writes into the shared block."""

    def append(self, seqs: Seqs, copies: Copies) -> int:
        shared, self.pool.shared = self.pool.shared, {}
        try:
            return super().append(seqs, copies)
        finally:
            self.pool.shared = shared


class ParentWritesInPlace(Paged):
    """Only the child knows that it has to copy."""

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        super().fork(parent, child, length)
        self._lens.pop(parent, None)


class RemembersTheDead(Paged):
    """What it knew of a sequence that was freed comes back with its key, as after a preemption."""

    def free(self, seq: Hashable) -> None:
        length = self._lens.get(seq)
        super().free(seq)
        if length is not None:
            self._lens[seq] = length


class CopyNotReported(Paged):
    def append(self, seqs: Seqs, copies: Copies) -> int:
        return super().append(seqs, [])


class CopyReversed(Paged):
    def append(self, seqs: Seqs, copies: Copies) -> int:
        done: Copies = []
        room = super().append(seqs, done)
        copies.extend(BlockCopy(copy.dst, copy.src, copy.num_slots) for copy in done)
        return room


class CopyOfWrongBlock(Paged):
    """The first block instead of the last."""

    def append(self, seqs: Seqs, copies: Copies) -> int:
        first = {table[-1]: table[0] for seq in seqs if (table := self.tables.get(seq))}
        size = self.block_size
        done: Copies = []
        room = super().append(seqs, done)
        copies.extend(BlockCopy(first.get(copy.src // size, 0) * size, copy.dst, copy.num_slots) for copy in done)
        return room


class CopyOneSlotShort(Paged):
    def append(self, seqs: Seqs, copies: Copies) -> int:
        done: Copies = []
        room = super().append(seqs, done)
        copies.extend(BlockCopy(copy.src, copy.dst, max(1, copy.num_slots - 1)) for copy in done)
        return room


class CopyLeavesThePool(Paged):
    def append(self, seqs: Seqs, copies: Copies) -> int:
        done: Copies = []
        room = super().append(seqs, done)
        copies.extend(BlockCopy(copy.src, copy.dst + self.num_slots, copy.num_slots) for copy in done)
        return room


class CopiesReplaced(Paged):
    """Forgets the work that an earlier call asked for."""

    def append(self, seqs: Seqs, copies: Copies) -> int:
        copies.clear()
        return super().append(seqs, copies)


# more than one sequence at a time


class CountIgnored(Paged):
    """One of them fits."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        return super().can_allocate(slots, keep)


class SlabsCountIgnored(Contiguous):
    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        return super().can_allocate(slots, keep)


class CountOfFreeBlocks(Buddy):
    """Enough blocks are free, but not in regions."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep)
        enough = (count << self._order(slots)) + keep // self.block_size <= self.heap.num_free
        return fit if fit is not Fit.OK or enough else Fit.LATER


class CountOfLargestHole(FirstFit):
    """The other holes hold none of them."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep, count)
        few = self._largest // self._rounded(slots) < count
        return Fit.LATER if fit is Fit.OK and few else fit


class NeverForSeveral(Paged):
    """What does not fit now never will."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep, count)
        return Fit.NEVER if fit is Fit.LATER and count > 1 else fit


class KeepForEach(Paged):
    """The watermark once more for each of them."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        return super().can_allocate(slots, keep * count, count)


# extend


class ExtendInPlace(Paged):
    """Writes into the shared block."""

    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        shared, self.pool.shared = self.pool.shared, {}
        try:
            return super().extend(seq, slots, copies)
        finally:
            self.pool.shared = shared


class ExtendCopyNotReported(Paged):
    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        return super().extend(seq, slots, [])


class ExtendAnswersMore(Paged):
    """What it was asked for, on top of what there was."""

    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        return super().extend(seq, slots, copies) + self.block_size


class ExtendNever(Paged):
    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        raise AllocationError(len(self.slots(seq)))


class ExtendKeepsPart(Paged):
    """Grants block by block, then raises."""

    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        granted = super().extend(seq, len(self.slots(seq)), copies)
        while granted < slots:
            self.tables[seq] += self.pool.take(1)
            granted += self.block_size
        return granted


class ExtendForgetsWhere(Paged):
    """The next ``append`` fills the block that was the last before."""

    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        length = self._lens.get(seq)
        granted = super().extend(seq, slots, copies)
        if length is not None:
            self._lens[seq] = length
        return granted


class ExtendUnshares(Paged):
    """Whoever begins with a prefix gets a copy of all of it."""

    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        granted, pool = super().extend(seq, slots, copies), self.pool
        table, size = self.tables[seq], self.block_size
        shared = [index for index, block in enumerate(table) if pool.num_holders(block) > 1]
        if len(shared) <= len(pool.free):
            for index in shared:
                block, table[index] = table[index], pool.free.pop()
                pool.leave(block)
                copies.append(BlockCopy(block * size, table[index] * size, size))
        return granted


class ExtendWantsASpareBlock(Paged):
    """Needs one more than it takes."""

    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        length = self._lens.get(seq, len(self.tables[seq]) * self.block_size)
        need = -(-slots // self.block_size) - length // self.block_size
        if need >= len(self.pool.free) > 0:
            raise AllocationError(self.block_size)
        return super().extend(seq, slots, copies)


class PrefixMoves(Paged):
    """Gives the last block to whoever writes into it, and the copy to the others."""

    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        done: Copies = []
        granted = super().extend(seq, slots, done)
        for copy in done:
            old, new = copy.src // self.block_size, copy.dst // self.block_size
            if self.pool.num_holders(old) == 1 and not self.swapped:
                for table in self.tables.values():
                    table[:] = [{old: new, new: old}.get(block, block) for block in table]
        copies += done
        return granted


class PrefixCopiedTooLate(Paged):
    """With the next call, when there may have been writes."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots, block_size)
        self.late: Copies = []

    def extend(self, seq: Hashable, slots: int, copies: Copies) -> int:
        done: Copies = []
        granted = super().extend(seq, slots, done)
        copies += self.late
        self.late = done
        return granted


class PrefixGoesWithItsLastReader(Paged):
    """Takes a block from the prefix too, once nobody else reads it."""

    def free(self, seq: Hashable) -> None:
        table = self.tables.get(seq, [])
        read = [block for block in table if self.pool.num_holders(block) == 2]
        super().free(seq)
        self.pool.free += read[:1]


# beams that move


class ReforkUnshares(Paged):
    """Copies what is full, too, to blocks that are free."""

    def refork(self, seqs: Sequence[Hashable], parents: Sequence[int], length: int, copies: Copies) -> None:
        super().refork(seqs, parents, length, copies)
        size, whole = self.block_size, length // self.block_size
        moved = [self.tables[seqs[i]] for i, parent in enumerate(parents) if parent != i]
        if whole * len(moved) <= len(self.pool.free):
            for table in moved:
                old, table[:whole] = table[:whole], self.pool.take(whole)
                copies += [BlockCopy(block * size, new * size, size) for block, new in zip(old, table, strict=False)]
                self.pool.give_back(old)


class ReforkCopyNotReported(Paged):
    def refork(self, seqs: Sequence[Hashable], parents: Sequence[int], length: int, copies: Copies) -> None:
        super().refork(seqs, parents, length, [])


class ReforkSharesTheLast(Paged):
    """Also the block that will be written."""

    def refork(self, seqs: Sequence[Hashable], parents: Sequence[int], length: int, copies: Copies) -> None:
        super().refork(seqs, parents, -(-length // self.block_size) * self.block_size, copies)


class ReforkForgetsHolders(Paged):
    def refork(self, seqs: Sequence[Hashable], parents: Sequence[int], length: int, copies: Copies) -> None:
        shared = self.pool.shared.copy()
        super().refork(seqs, parents, length, copies)
        self.pool.shared = shared


class ReforkOneAfterTheOther(Paged):
    """Follows the beam before it instead."""

    def refork(self, seqs: Sequence[Hashable], parents: Sequence[int], length: int, copies: Copies) -> None:
        stays = [i for i, parent in enumerate(parents) if parent == i]
        super().refork(
            seqs, [i if i in stays else stays[0] for i in range(len(seqs))] if stays else parents, length, copies
        )


# swap


class SwapOutLeavesBlocks(Paged):
    """The blocks of those who are out stay taken."""

    def swap_out(self, seqs: Seqs) -> Copies:
        moves = super().swap_out(seqs)
        for move in moves:
            self.pool.free.remove(move.src // self.block_size)
        return moves


class SwapOutTakesAll(Paged):
    """What others hold as well leaves too, and they are left with a block that is free."""

    def swap_out(self, seqs: Seqs) -> Copies:
        shared, saved = self.pool.shared, self.pool.num_saved
        inside: dict[int, int] = {}
        for seq in seqs:
            for block in self.tables[seq]:
                inside[block] = inside.get(block, 0) + 1
        self.pool.shared = shared | {block: count for block, count in inside.items() if count > 1}
        for block, count in inside.items():
            if count == 1:
                self.pool.shared.pop(block, None)
        try:
            return super().swap_out(seqs)
        except AllocationError:
            self.pool.shared, self.pool.num_saved = shared, saved
            raise


class SwapOutMissesTheLast(Paged):
    """Thinks that the block that is being filled is not worth moving."""

    def swap_out(self, seqs: Seqs) -> Copies:
        moves = super().swap_out(seqs)
        return moves[:-1] if len(moves) > 1 else moves


class SwapOutReversed(Paged):
    def swap_out(self, seqs: Seqs) -> Copies:
        return [BlockCopy(move.dst, move.src, move.num_slots) for move in super().swap_out(seqs)]


class SwapOutRefusesHalf(Paged):
    """Calls the host pool full when it is half full."""

    def swap_out(self, seqs: Seqs) -> Copies:
        if len(self.host_pool.free) * 2 <= self.host_pool.num_blocks:
            raise AllocationError(self.num_slots)
        return super().swap_out(seqs)


class FullHostPoolKeepsPart(Paged):
    """Fills what is left of the host pool, then raises."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots, block_size, host_slots=num_slots // 2)

    def swap_out(self, seqs: Seqs) -> Copies:
        try:
            return super().swap_out(seqs)
        except AllocationError:
            self.host_pool.free.clear()
            raise


class HostBlockGivenTwice(Paged):
    """The books are right, but the host block of one who is out is handed to the next."""

    def swap_out(self, seqs: Seqs) -> Copies:
        size = self.block_size
        return [BlockCopy(move.src, max(move.dst - size, 0), size) for move in super().swap_out(seqs)]


class SwapInUnshares(Paged):
    """Everyone returns with blocks of their own."""

    def swap_in(self, seqs: Seqs) -> Copies:
        moves = super().swap_in(seqs)
        size = self.block_size
        for seq in list(seqs)[1:]:
            for index, block in enumerate(self.tables[seq]):
                if self.pool.num_holders(block) > 1 and self.pool.free:
                    self.pool.give_back([block])
                    (self.tables[seq][index],) = self.pool.take(1)
                    moves.append(BlockCopy(block * size, self.tables[seq][index] * size, size))
        return moves


class SwapInSortsTable(Paged):
    def swap_in(self, seqs: Seqs) -> Copies:
        moves = super().swap_in(seqs)
        for seq in seqs:
            self.tables[seq].sort()
        return moves


class SwapForgetsFork(Paged):
    """Where the tokens of a fork ended is forgotten while it is out."""

    def swap_out(self, seqs: Seqs) -> Copies:
        moves = super().swap_out(seqs)
        for seq in seqs:
            self._lens.pop(seq, None)
        return moves


class SwappedNotFreed(Paged):
    """The host blocks of one who ends while it is out stay taken."""

    def free(self, seq: Hashable) -> None:
        if seq in self.swapped:
            del self.swapped[seq]
        else:
            super().free(seq)


class SwappedNotCounted(Paged):
    def usage(self) -> Usage:
        books = super().usage()
        return Usage(books.used, books.free, books.largest_free, shared=books.shared)


class SharedNotCounted(Paged):
    def usage(self) -> Usage:
        books = super().usage()
        return Usage(books.used, books.free, books.largest_free, swapped=books.swapped)


class CanSwapInAlways(Paged):
    def can_swap_in(self, seqs: Seqs, keep: int = 0) -> bool:
        return True


class CanSwapInIgnoresKeep(Paged):
    def can_swap_in(self, seqs: Seqs, keep: int = 0) -> bool:
        return super().can_swap_in(seqs)


class CanSwapInCountsSharedTwice(Paged):
    """One block for each entry of their tables."""

    def can_swap_in(self, seqs: Seqs, keep: int = 0) -> bool:
        need = sum(block < 0 for seq in seqs for block in self.swapped[seq])
        return need + keep // self.block_size <= len(self.pool.free)


class ForkOntoSwapped(Paged):
    """A child that is out is taken for a new one."""

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        out = self.swapped.pop(child, None)
        super().fork(parent, child, length)
        if out is not None:
            self.swapped[child] = out


class UndeclaredSwap(Paged):
    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots, block_size)
        self.abilities = Ability.ANY_SIZE | Ability.GROW | Ability.FORK

    def swap_out(self, seqs: Seqs) -> Copies:
        self.abilities |= Ability.SWAP
        return super().swap_out(seqs)


# answers


class UsageCountsSharedTwice(Paged):
    def usage(self) -> Usage:
        used = sum(map(len, self.tables.values())) * self.block_size
        return Usage(used, self.num_slots - used, len(self.pool.free) * self.block_size)


class UsageForgetsTheRest(Paged):
    """The slots beyond the last whole block are neither used nor free."""

    def usage(self) -> Usage:
        books = super().usage()
        return Usage(books.used, books.free - self.num_slots % self.block_size, books.largest_free)


class LargestIsAllThatIsFree(FirstFit):
    def usage(self) -> Usage:
        books = super().usage()
        return Usage(books.used, books.free, self._free)


class FitIgnoresHoles(FirstFit):
    """Enough slots are free, but not side by side."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        size = self._rounded(slots)
        if size + keep > self._end:
            return Fit.NEVER
        return Fit.OK if size + keep <= self._free else Fit.LATER


class FitIgnoresKeep(Paged):
    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        return super().can_allocate(slots)


class NeverTooEarly(Paged):
    """A request for the whole pool is refused for ever."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        need = -(-slots // self.block_size) + keep // self.block_size
        return Fit.NEVER if need >= self.pool.num_blocks else super().can_allocate(slots, keep, count)


class NeverInsteadOfLater(Buddy):
    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep, count)
        return Fit.NEVER if fit is Fit.LATER and self.heap.num_free == 0 else fit


class LaterInsteadOfNever(Contiguous):
    """A scheduler would wait for ever."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep, count)
        return Fit.LATER if fit is Fit.NEVER else fit


class LaterWhereItFits(Buddy):
    """Wants a larger region than it needs."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep, count)
        exact = fit is Fit.OK and self._order(slots) == self.heap.largest_free_order()
        return Fit.LATER if exact and self.heap.num_free < self.heap.num_blocks else fit


class AskingTakesABlock(Paged):
    """Sets a block aside for whoever asked."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep, count)
        if fit is Fit.LATER and self.pool.free:
            self.pool.free.pop()
        return fit


class PromisedToTheFirst(Paged):
    """Says OK to the first who asks for slots above the watermark, and to nobody else."""

    promised = False

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep, count)
        if fit is not Fit.OK or not keep:
            return fit
        promised, self.promised = self.promised, True
        return Fit.LATER if promised else Fit.OK


class AskingReordersFreeList(Paged):
    """Invisible at first."""

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        fit = super().can_allocate(slots, keep, count)
        if fit is Fit.LATER and self.pool.free:
            self.pool.free.insert(0, self.pool.free.pop())
        return fit


class CanAppendAlways(Paged):
    def can_append(self, num_seqs: int) -> bool:
        return True


class CanAppendCountsSequencesAsBlocks(Paged):
    """One free block for all of them."""

    def can_append(self, num_seqs: int) -> bool:
        return not num_seqs or bool(self.pool.free)


class CanAppendNever(Paged):
    def can_append(self, num_seqs: int) -> bool:
        return False


class RoomTooLarge(Paged):
    def append(self, seqs: Seqs, copies: Copies) -> int:
        return super().append(seqs, copies) + 1


class RoomOfTheLuckiest(Paged):
    """The largest room of the sequences instead of the smallest."""

    def append(self, seqs: Seqs, copies: Copies) -> int:
        super().append(seqs, copies)
        return self.block_size


class RoomForgotten(Paged):
    def append(self, seqs: Seqs, copies: Copies) -> int:
        return super().append(seqs, copies) * 0


class GrantsWhatIsLeft(Paged):
    """Rounds down where it should round up."""

    def allocate(self, seq: Hashable, slots: int) -> int:
        size = self.block_size
        return super().allocate(seq, slots - slots % size if slots > 2 * size else slots)


class GrantNotListed(FirstFit):
    def slots(self, seq: Hashable) -> list[int]:
        return super().slots(seq)[:-1] or super().slots(seq)


class SortedTable(Paged):
    """slots() in order of address, not of the tokens."""

    def slots(self, seq: Hashable) -> list[int]:
        return sorted(super().slots(seq))


class NewBlockFirst(Paged):
    def append(self, seqs: Seqs, copies: Copies) -> int:
        old = {seq: len(self.tables[seq]) for seq in seqs if seq in self.tables}
        room = super().append(seqs, copies)
        for seq, num_blocks in old.items():
            table = self.tables[seq]
            if len(table) > num_blocks > 2:
                table.insert(0, table.pop())
        return room


class MovesWithoutCopy(FirstFit):
    """Compacts its extents when one is freed, and tells nobody."""

    def free(self, seq: Hashable) -> None:
        super().free(seq)
        start = 0
        for other, (_, size) in list(self._extents.items()):
            self._extents[other] = (start, size)
            start += size
        self._holes = [(start, self._end - start)] if start < self._end else []
        self._changed(0)


class RandomBlocks(Paged):
    random = Random(0)

    def allocate(self, seq: Hashable, slots: int) -> int:
        self.random.shuffle(self.pool.free)
        return super().allocate(seq, slots)


class SetOrder(Paged):
    """Serves sequences in the order of their hashes."""

    def append(self, seqs: Seqs, copies: Copies) -> int:
        return super().append(set(seqs), copies)


class UndeclaredGrowth(Paged):
    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots, block_size)
        self.abilities = Ability.ANY_SIZE | Ability.FORK


class DeclaredGrowth(Buddy):
    abilities = Ability.ANY_SIZE | Ability.GROW


class AnySizeNotDeclared(FirstFit):
    abilities = Ability.NONE


class NewPoolNotFree(Paged):
    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots, block_size)
        self.pool.free.pop()


@dataclass(frozen=True, slots=True)
class Bug:
    """A buggy allocator, the laws that it may break first, and whether only a directed check can notice."""

    kind: type[Buddy | Contiguous | FirstFit | Paged]
    laws: tuple[Law, ...]
    directed: bool = False

    def build(self) -> Allocator:
        return self.kind(34, 4)


BUGS = [
    Bug(LeakLastBlock, (Law.BOOKS,)),
    Bug(LeakForkedFree, (Law.BOOKS,)),
    Bug(DoubleFree, (Law.BOOKS, Law.EXCLUSIVE)),
    Bug(DoubleGrant, (Law.BOOKS,)),
    Bug(OverlappingSlabs, (Law.EXCLUSIVE,)),
    Bug(SlabFreedTwice, (Law.BOOKS,)),
    Bug(BuddyNeverMerges, (Law.LEAK,)),
    Bug(BuddyMergesOnce, (Law.LEAK,)),
    Bug(BuddyMergesRight, (Law.LEAK,)),
    Bug(FirstFitMergesLeftOnly, (Law.LEAK,)),
    Bug(FirstFitMergesRightOnly, (Law.LEAK,)),
    Bug(AllocateKeepsPart, (Law.ATOMIC,)),
    Bug(AppendOneByOne, (Law.ATOMIC, Law.DETERMINISM)),
    Bug(ErrorReordersFreeList, (Law.DETERMINISM,)),
    Bug(ErrorLeavesCopies, (Law.ATOMIC,)),
    Bug(ForgivesDoubleFree, (Law.ERRORS,)),
    Bug(ReplacesOnSecondAllocate, (Law.ERRORS,)),
    Bug(UntypedShortage, (Law.ERRORS,)),
    Bug(ShortageTooSmall, (Law.ERRORS,)),
    Bug(ForkForgetsLastHolder, (Law.BOOKS, Law.EXCLUSIVE)),
    Bug(ThirdHolderNotCounted, (Law.BOOKS, Law.EXCLUSIVE)),
    Bug(ForkSharesTable, (Law.BOOKS, Law.EXCLUSIVE, Law.MEMORY)),
    Bug(NoCopyOnWrite, (Law.EXCLUSIVE,)),
    Bug(ParentWritesInPlace, (Law.EXCLUSIVE,)),
    Bug(RemembersTheDead, (Law.ROOM, Law.EXCLUSIVE, Law.ERRORS)),
    Bug(CopyNotReported, (Law.MEMORY,)),
    Bug(CopyReversed, (Law.MEMORY, Law.COPIES)),
    Bug(CopyOfWrongBlock, (Law.MEMORY, Law.COPIES)),
    Bug(CopyOneSlotShort, (Law.MEMORY,)),
    Bug(CopyLeavesThePool, (Law.COPIES,)),
    Bug(CopiesReplaced, (Law.COPIES, Law.ATOMIC)),
    Bug(ForkTakesBlocks, (Law.FORK, Law.ERRORS)),
    Bug(ForkReversesTable, (Law.FORK,)),
    Bug(CountIgnored, (Law.FIT,)),
    Bug(SlabsCountIgnored, (Law.FIT,)),
    Bug(CountOfFreeBlocks, (Law.FIT,)),
    Bug(CountOfLargestHole, (Law.FIT,), directed=True),
    Bug(NeverForSeveral, (Law.FIT,)),
    Bug(KeepForEach, (Law.FIT,)),
    Bug(ExtendInPlace, (Law.EXCLUSIVE,)),
    Bug(ExtendCopyNotReported, (Law.MEMORY,)),
    Bug(ExtendAnswersMore, (Law.EXTEND,)),
    Bug(ExtendNever, (Law.EXTEND,)),
    Bug(ExtendKeepsPart, (Law.ATOMIC, Law.DETERMINISM, Law.EXCLUSIVE)),
    Bug(ExtendForgetsWhere, (Law.ROOM, Law.EXCLUSIVE)),
    Bug(ExtendUnshares, (Law.PREFIX,)),
    Bug(ExtendWantsASpareBlock, (Law.PREFIX,)),
    Bug(PrefixMoves, (Law.PREFIX,)),
    Bug(PrefixCopiedTooLate, (Law.MEMORY,)),
    Bug(PrefixGoesWithItsLastReader, (Law.BOOKS, Law.EXCLUSIVE)),
    Bug(ReforkUnshares, (Law.REFORK,)),
    Bug(ReforkCopyNotReported, (Law.MEMORY,)),
    Bug(ReforkSharesTheLast, (Law.REFORK, Law.EXCLUSIVE)),
    Bug(ReforkForgetsHolders, (Law.BOOKS, Law.EXCLUSIVE, Law.SWAP)),
    Bug(ReforkOneAfterTheOther, (Law.REFORK, Law.MEMORY)),
    Bug(SwapOutLeavesBlocks, (Law.BOOKS,)),
    Bug(SwapOutTakesAll, (Law.SWAP, Law.BOOKS)),
    Bug(SwapOutMissesTheLast, (Law.SWAP,)),
    Bug(SwapOutReversed, (Law.SWAP,)),
    Bug(SwapOutRefusesHalf, (Law.SWAP, Law.ERRORS)),
    Bug(FullHostPoolKeepsPart, (Law.ATOMIC,)),
    Bug(HostBlockGivenTwice, (Law.SWAP,)),
    Bug(SwapInUnshares, (Law.SWAP,)),
    Bug(SwapInSortsTable, (Law.SWAP,)),
    Bug(SwapForgetsFork, (Law.ROOM, Law.EXCLUSIVE, Law.MEMORY), directed=True),
    Bug(SwappedNotFreed, (Law.BOOKS,)),
    Bug(SwappedNotCounted, (Law.BOOKS,)),
    Bug(SharedNotCounted, (Law.BOOKS,)),
    Bug(CanSwapInAlways, (Law.CAN_SWAP_IN,)),
    Bug(CanSwapInIgnoresKeep, (Law.CAN_SWAP_IN,)),
    Bug(CanSwapInCountsSharedTwice, (Law.CAN_SWAP_IN,)),
    Bug(ForkOntoSwapped, (Law.ERRORS,), directed=True),
    Bug(UndeclaredSwap, (Law.ABILITIES,)),
    Bug(UsageCountsSharedTwice, (Law.BOOKS, Law.FORK)),
    Bug(UsageForgetsTheRest, (Law.PROTOCOL,)),
    Bug(LargestIsAllThatIsFree, (Law.LARGEST,)),
    Bug(FitIgnoresHoles, (Law.LARGEST, Law.FIT)),
    Bug(FitIgnoresKeep, (Law.FIT,)),
    Bug(NeverTooEarly, (Law.LARGEST, Law.FIT)),
    Bug(NeverInsteadOfLater, (Law.FIT,)),
    Bug(LaterInsteadOfNever, (Law.FIT,)),
    Bug(LaterWhereItFits, (Law.LARGEST, Law.FIT)),
    Bug(AskingTakesABlock, (Law.PURE, Law.BOOKS)),
    Bug(PromisedToTheFirst, (Law.PURE,)),
    Bug(AskingReordersFreeList, (Law.DETERMINISM,)),
    Bug(CanAppendAlways, (Law.CAN_APPEND,)),
    Bug(CanAppendCountsSequencesAsBlocks, (Law.CAN_APPEND,)),
    Bug(CanAppendNever, (Law.CAN_APPEND,), directed=True),
    Bug(RoomTooLarge, (Law.ROOM,)),
    Bug(RoomOfTheLuckiest, (Law.ROOM,)),
    Bug(RoomForgotten, (Law.ROOM,)),
    Bug(GrantsWhatIsLeft, (Law.GRANT, Law.FIT, Law.ERRORS)),
    Bug(GrantNotListed, (Law.GRANT,)),
    Bug(SortedTable, (Law.MEMORY, Law.FORK, Law.EXCLUSIVE)),
    Bug(NewBlockFirst, (Law.MEMORY, Law.EXCLUSIVE)),
    Bug(MovesWithoutCopy, (Law.MEMORY,)),
    Bug(RandomBlocks, (Law.DETERMINISM,)),
    Bug(SetOrder, (Law.DETERMINISM,)),
    Bug(AnySizeNotDeclared, (Law.GRANT,)),
    Bug(UndeclaredGrowth, (Law.ABILITIES,)),
    Bug(DeclaredGrowth, (Law.CAN_APPEND,), directed=True),
    Bug(NewPoolNotFree, (Law.PROTOCOL,)),
]

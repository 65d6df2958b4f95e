"""Paged placement (vLLM): fixed blocks anywhere in the pool, reached through a block table, shared copy-on-write."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from kvbench.allocators.base import Ability, AllocationError
from kvbench.allocators.block_pool import BlockPool
from kvbench.core import BlockCopy, Fit, KvbenchError, Usage

OK = Fit.OK  # looked up at every admission


class Paged:
    """Block tables over one pool of equal blocks.

    Args:
        num_slots: the pool; slots beyond the last whole block stay unused (and count as free).
        block_size: slots of a block, at least 1 and at most the pool.
        copy_on_write: whether ``fork`` shares blocks. Without it the allocator cannot fork.

    Raises:
        KvbenchError: a block size below 1, or larger than the pool.
    """

    def __init__(self, num_slots: int, block_size: int = 16, *, copy_on_write: bool = True) -> None:
        if block_size < 1:
            raise KvbenchError(f"allocator.block_size={block_size}: a block holds at least 1 slot; give 1 or more")
        if block_size > num_slots:
            raise KvbenchError(
                f"allocator.block_size={block_size} is larger than the pool of {num_slots} slots; give at most that"
            )
        self.abilities = Ability.ANY_SIZE | Ability.GROW | (Ability.FORK if copy_on_write else Ability.NONE)
        self.num_slots = num_slots
        self.block_size = block_size
        self.pool = BlockPool(num_slots // block_size)
        self.tables: dict[Hashable, list[int]] = {}
        self._lens: dict[Hashable, int] = {}  # of forked sequences: the tokens they hold when they ask next

    def can_allocate(self, slots: int, keep: int = 0) -> Fit:
        """Blocks are interchangeable, so only their number counts."""
        need = (slots + keep + self.block_size - 1) // self.block_size  # `keep` is whole blocks
        if need <= len(self.pool.free):
            return OK
        return Fit.LATER if need <= self.pool.num_blocks else Fit.NEVER

    def allocate(self, seq: Hashable, slots: int) -> int:
        """Fill a new block table; returns ``slots`` rounded up to whole blocks."""
        if seq in self.tables:
            raise ValueError(f"{seq!r} holds slots already")
        if slots < 1:
            raise ValueError(f"slots={slots}: at least 1")
        size = self.block_size
        need = -(-slots // size)
        try:
            self.tables[seq] = self.pool.take(need)
        except AllocationError as short:
            raise AllocationError(short.shortage * size) from None
        return need * size

    def can_append(self, num_seqs: int) -> bool:
        """One free block for each of them, whether it will need one or only has to copy or fill its last."""
        return num_seqs <= len(self.pool.free)

    def append(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        """Add a block to each table; a forked sequence first fills its last block, copying it if it is shared."""
        tables, pool, size = self.tables, self.pool, self.block_size
        if self._lens:
            return self._append_forked(seqs, copies)
        free = pool.free
        if len(seqs) > len(free):
            raise AllocationError((len(seqs) - len(free)) * size)
        done = 0
        try:
            for seq in seqs:
                tables[seq].append(free.pop())
                done += 1
        except KeyError:
            for seq in reversed(list(seqs)[:done]):  # the free list as it was, in its order too
                free.append(tables[seq].pop())
            raise
        return size

    def _append_forked(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        """``append`` while the tokens of some sequence end before its last slot, as after a fork."""
        pool, size, lens = self.pool, self.block_size, self._lens
        held = {seq: self.tables[seq] for seq in seqs}
        starts = {seq: lens.get(seq, len(table) * size) for seq, table in held.items()}
        # A shared block is copied by every holder but the last to write; the last finds it its own.
        sharers: dict[int, int] = {}
        need = 0
        for seq, table in held.items():
            index = starts[seq] // size
            if index == len(table):
                need += 1
                continue
            left = sharers.get(table[index], pool.num_holders(table[index]))
            need += left > 1
            sharers[table[index]] = left - 1
        if need > len(pool.free):
            raise AllocationError((need - len(pool.free)) * size)
        for seq, table in held.items():
            index, filled = divmod(starts[seq], size)
            if index == len(table):
                table.extend(pool.take(1))
            elif pool.num_holders(block := table[index]) > 1:
                (table[index],) = pool.take(1)
                pool.give_back([block])
                copies.append(BlockCopy(block * size, table[index] * size, filled))
        gained = min((len(table) * size - starts[seq] for seq, table in held.items()), default=size)
        for seq, table in held.items():
            lens[seq] = starts[seq] + gained
            if lens[seq] == len(table) * size:
                del lens[seq]
        return gained

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        """Share the blocks of the first ``length`` tokens; whoever writes into a shared last block first copies it.

        What the parent holds beyond these blocks stays its own.
        """
        if Ability.FORK not in self.abilities:
            raise KvbenchError("copy_on_write=false: this allocator shares no blocks; set allocator.copy_on_write=true")
        table, size = self.tables[parent], self.block_size
        if child in self.tables:
            raise ValueError(f"{child!r} holds slots already")
        if not 1 <= length <= len(table) * size:
            raise ValueError(f"length={length} is not within the {len(table) * size} slots of {parent!r}")
        shared = table[: -(-length // size)]
        self.pool.share(shared)
        self.tables[child] = shared
        self._lens[parent] = self._lens[child] = length

    def free(self, seq: Hashable) -> None:
        """Drop the sequence from the holders of its blocks."""
        self.pool.give_back(self.tables.pop(seq))
        if self._lens:
            self._lens.pop(seq, None)

    def slots(self, seq: Hashable) -> list[int]:
        """``table[i // block_size] * block_size + i % block_size`` for every i."""
        size = self.block_size
        return [slot for block in self.tables[seq] for slot in range(block * size, block * size + size)]

    def usage(self) -> Usage:
        """Any free block serves any sequence, so nothing free is fragmented."""
        free = len(self.pool.free) * self.block_size
        used = self.pool.num_blocks * self.block_size - free
        return Usage(used, self.num_slots - used, free)

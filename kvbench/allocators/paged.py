"""Paged placement (vLLM): fixed blocks anywhere in the pool, reached through a block table, shared copy-on-write."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from kvbench.allocators.base import Ability, AllocationError
from kvbench.allocators.block_pool import BlockPool
from kvbench.core import BlockCopy, Fit, KvbenchError, Usage


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
        self._tails: dict[Hashable, int] = {}  # forked, not written since: tokens in its last block

    def can_allocate(self, slots: int, keep: int = 0) -> Fit:
        """Blocks are interchangeable, so only their number counts."""
        size = self.block_size
        need = -(-slots // size) + keep // size
        if need <= len(self.pool.free):
            return Fit.OK
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
        if self._tails:
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
            for seq in list(seqs)[:done]:
                free.append(tables[seq].pop())
            raise
        return size

    def _append_forked(self, seqs: Collection[Hashable], copies: list[BlockCopy]) -> int:
        """``append`` while some sequence has not written since its fork."""
        tables, pool, size, tails = self.tables, self.pool, self.block_size, self._tails
        # A shared block is copied by every holder but the last to write; the last finds it its own.
        held = {seq: tables[seq] for seq in seqs}
        sharers: dict[int, int] = {}
        need = 0
        for seq, table in held.items():
            if tails.get(seq, size) == size:
                need += 1
                continue
            left = sharers.get(table[-1], pool.num_holders(table[-1]))
            need += left > 1
            sharers[table[-1]] = left - 1
        if need > len(pool.free):
            raise AllocationError((need - len(pool.free)) * size)
        gained = size
        for seq, table in held.items():
            filled = tails.pop(seq, size)
            if filled == size:
                table.extend(pool.take(1))
                continue
            gained = min(gained, size - filled)
            last = table[-1]
            if pool.num_holders(last) > 1:
                (copy,) = pool.take(1)
                pool.give_back([last])
                table[-1] = copy
                copies.append(BlockCopy(last * size, copy * size, filled))
        return gained

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        """Share the blocks of the first ``length`` tokens; whoever writes into a shared last block first copies it."""
        if Ability.FORK not in self.abilities:
            raise KvbenchError("copy_on_write=false: this allocator shares no blocks; set allocator.copy_on_write=true")
        table, size = self.tables[parent], self.block_size
        if child in self.tables:
            raise ValueError(f"{child!r} holds slots already")
        num_blocks = -(-length // size)
        if not 1 <= length or num_blocks != len(table):
            raise ValueError(f"length={length} does not end in the parent's last of {len(table)} blocks")
        self.pool.share(table)
        self.tables[child] = table.copy()
        self._tails[parent] = self._tails[child] = length - (num_blocks - 1) * size

    def free(self, seq: Hashable) -> None:
        """Drop the sequence from the holders of its blocks."""
        self.pool.give_back(self.tables.pop(seq))
        if self._tails:
            self._tails.pop(seq, None)

    def slots(self, seq: Hashable) -> list[int]:
        """``table[i // block_size] * block_size + i % block_size`` for every i."""
        size = self.block_size
        return [slot for block in self.tables[seq] for slot in range(block * size, block * size + size)]

    def usage(self) -> Usage:
        """Any free block serves any sequence, so nothing free is fragmented."""
        free = len(self.pool.free) * self.block_size
        used = self.pool.num_blocks * self.block_size - free
        return Usage(used, self.num_slots - used, free)

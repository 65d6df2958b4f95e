"""Paged placement (vLLM): fixed blocks anywhere in the pool, reached through a block table, shared copy-on-write."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from collections.abc import Sequence as Seq

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
        host_slots: size of the host pool; None: as many as the pool, 0: there is none.

    Raises:
        KvbenchError: a block size below 1, or larger than the pool, a host pool of less than 0 slots.
    """

    def __init__(
        self, num_slots: int, block_size: int = 16, *, copy_on_write: bool = True, host_slots: int | None = None
    ) -> None:
        if block_size < 1:
            raise KvbenchError(f"allocator.block_size={block_size}: a block holds at least 1 slot; give 1 or more")
        if block_size > num_slots:
            raise KvbenchError(
                f"allocator.block_size={block_size} is larger than the pool of {num_slots} slots; give at most that"
            )
        host_slots = num_slots if host_slots is None else host_slots
        if host_slots < 0:
            raise KvbenchError(f"host_slots={host_slots} is below 0; give 0 for no host pool")
        self.abilities = Ability.ANY_SIZE | Ability.GROW
        self._shares = copy_on_write
        self.abilities |= Ability.FORK if copy_on_write else Ability.NONE
        self.abilities |= Ability.SWAP if host_slots >= block_size else Ability.NONE
        self.num_slots = num_slots
        self.block_size = block_size
        self.host_slots = host_slots
        self.pool = BlockPool(num_slots // block_size)
        self.host_pool = BlockPool(host_slots // block_size)
        self.tables: dict[Hashable, list[int]] = {}
        self.swapped: dict[Hashable, list[int]] = {}  # tables of the sequences that are out; block ~b is host block b
        self._lens: dict[Hashable, int] = {}  # of forked sequences: the tokens they hold when they ask next

    def can_allocate(self, slots: int, keep: int = 0, count: int = 1) -> Fit:
        """Blocks are interchangeable, so only their number counts."""
        need = (slots + keep + self.block_size - 1) // self.block_size  # `keep` is whole blocks
        if count != 1:
            need += (count - 1) * -(-slots // self.block_size)
        if need <= len(self.pool.free):
            return OK
        return Fit.LATER if need <= self.pool.num_blocks else Fit.NEVER

    def allocate(self, seq: Hashable, slots: int) -> int:
        """Fill a new block table; returns ``slots`` rounded up to whole blocks."""
        if seq in self.tables or seq in self.swapped:
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
        if self._lens and not self._lens.keys().isdisjoint(seqs):
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
        size, lens = self.block_size, self._lens
        free, shared = self.pool.free, self.pool.shared
        tables = [self.tables[seq] for seq in seqs]
        if len(tables) > len(free):
            starts = [lens.get(seq, len(table) * size) for seq, table in zip(seqs, tables, strict=True)]
            self._check_room(tables, starts)
        gained = self.num_slots
        ends: dict[Hashable, int] = {}
        for seq, table in zip(seqs, tables, strict=True):
            end = len(table) * size
            start = lens.get(seq, end)
            if start == end:
                table.append(free.pop())
                gained = min(gained, size)
                continue
            index = start // size
            block = table[index]
            if block in shared:
                self.pool.leave(block)
                table[index] = new = free.pop()
                copies.append(BlockCopy(block * size, new * size, start % size))
            gained = min(gained, end - start)
            ends[seq] = end
        for seq, end in ends.items():
            if lens[seq] + gained == end:
                del lens[seq]
            else:
                lens[seq] += gained
        if gained < size:
            for seq, table in zip(seqs, tables, strict=True):
                if seq not in ends:
                    lens[seq] = (len(table) - 1) * size + gained
        return gained

    def _check_room(self, tables: list[list[int]], starts: list[int]) -> None:
        """Whether the free blocks do, where there is not one for each. Raises AllocationError.

        A shared block is copied by every holder but the last to write; the last finds it its own.
        """
        pool, size = self.pool, self.block_size
        sharers: dict[int, int] = {}
        need = 0
        for table, start in zip(tables, starts, strict=True):
            index = start // size
            if index == len(table):
                need += 1
                continue
            left = sharers.get(table[index], pool.num_holders(table[index]))
            need += left > 1
            sharers[table[index]] = left - 1
        if need > len(pool.free):
            raise AllocationError((need - len(pool.free)) * size)

    def fork(self, parent: Hashable, child: Hashable, length: int) -> None:
        """Share the blocks of the first ``length`` tokens; whoever writes into a shared last block first copies it.

        What the parent holds beyond these blocks stays its own.
        """
        self._check_shares()
        table, size = self.tables[parent], self.block_size
        if child in self.tables or child in self.swapped:
            raise ValueError(f"{child!r} holds slots already")
        if not 1 <= length <= len(table) * size:
            raise ValueError(f"length={length} is not within the {len(table) * size} slots of {parent!r}")
        shared = table[: -(-length // size)]
        self.pool.share(shared)
        self.tables[child] = shared
        if length % size:
            self._lens[child] = length
        if length != len(table) * size:
            self._lens[parent] = length

    def refork(self, seqs: Seq[Hashable], parents: Seq[int], length: int, copies: list[BlockCopy]) -> None:
        """Share the full blocks, copy what is in the last."""
        self._check_shares()
        tables, size, follow = self.tables, self.block_size, self.pool.follow
        last, filled = divmod(length, size)
        for i, parent in enumerate(parents):
            if parent != i:
                source, table = tables[seqs[parent]], tables[seqs[i]]
                if filled:
                    copies.append(BlockCopy(source[last] * size, table[last] * size, filled))
                follow(source, table, last)

    def extend(self, seq: Hashable, slots: int, copies: list[BlockCopy]) -> int:
        """Add blocks up to ``slots``; a last block that is shared and not full is copied first."""
        self._check_shares()
        table, size, pool = self.tables[seq], self.block_size, self.pool
        length = self._lens.get(seq, len(table) * size)
        index, filled = divmod(length, size)
        copied = slots > length and filled > 0 and pool.num_holders(table[index]) > 1
        more = max(0, -(-slots // size) - len(table))
        taken = self._take(pool, more + copied)
        if copied:
            block, table[index] = table[index], taken.pop()
            pool.give_back([block])
            copies.append(BlockCopy(block * size, table[index] * size, filled))
        table += taken
        if slots > length:
            self._lens.pop(seq, None)
        return len(table) * size

    def _check_shares(self) -> None:
        if not self._shares:
            raise KvbenchError("copy_on_write=false: this allocator shares no blocks; set allocator.copy_on_write=true")

    def swap_out(self, seqs: Collection[Hashable]) -> list[BlockCopy]:
        """One host block for each block that only these sequences hold."""
        if Ability.SWAP not in self.abilities:
            raise KvbenchError("there is no host pool; give swap_space_bytes= of a block or more")
        pool, host, size = self.pool, self.host_pool, self.block_size
        holders: dict[int, int] = {}
        for seq in seqs:
            for block in self.tables[seq]:
                holders[block] = holders.get(block, 0) + 1
        where = self._counterparts(
            {block: count for block, count in holders.items() if count == pool.num_holders(block)}, host
        )
        for seq in seqs:
            table = self.tables.pop(seq)
            self.swapped[seq] = [~where[block] if block in where else block for block in table]
            pool.give_back([block for block in table if block in where])
        return [BlockCopy(block * size, host_block * size, size) for block, host_block in where.items()]

    def can_swap_in(self, seqs: Collection[Hashable], keep: int = 0) -> bool:
        """One free block for each host block they hold."""
        return len(self._host_blocks(seqs)) + keep // self.block_size <= len(self.pool.free)

    def swap_in(self, seqs: Collection[Hashable]) -> list[BlockCopy]:
        """One block for each host block they hold."""
        pool, host, size = self.pool, self.host_pool, self.block_size
        where = self._counterparts(self._host_blocks(seqs), pool)
        for seq in seqs:
            table = self.swapped.pop(seq)
            self.tables[seq] = [where[~block] if block < 0 else block for block in table]
            host.give_back([~block for block in table if block < 0])
        return [BlockCopy(host_block * size, block * size, size) for host_block, block in where.items()]

    def _counterparts(self, holders: dict[int, int], target: BlockPool) -> dict[int, int]:
        """Take a block of ``target`` for each of these, held by as many. Raises AllocationError, short in slots."""
        where = dict(zip(holders, self._take(target, len(holders)), strict=True))
        for block, counterpart in where.items():
            target.share([counterpart] * (holders[block] - 1))
        return where

    def _take(self, pool: BlockPool, count: int) -> list[int]:
        """``pool.take``, whose shortage is in blocks, with one in slots."""
        try:
            return pool.take(count)
        except AllocationError as short:
            raise AllocationError(short.shortage * self.block_size) from None

    def _host_blocks(self, seqs: Collection[Hashable]) -> dict[int, int]:
        """The host blocks of these sequences, and how many of them hold each."""
        holders: dict[int, int] = {}
        for seq in seqs:
            for block in self.swapped[seq]:
                if block < 0:
                    holders[~block] = holders.get(~block, 0) + 1
        return holders

    def free(self, seq: Hashable) -> None:
        """Drop the sequence from the holders of its blocks."""
        if self.swapped and seq in self.swapped:
            table = self.swapped.pop(seq)
            self.host_pool.give_back([~block for block in table if block < 0])
            self.pool.give_back([block for block in table if block >= 0])
        else:
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
        saved = self.pool.num_saved
        if not saved and not self.swapped:
            return Usage(used, self.num_slots - used, free)
        swapped = (self.host_pool.num_blocks - len(self.host_pool.free)) * self.block_size
        return Usage(used, self.num_slots - used, free, 0, 0, saved * self.block_size, swapped)

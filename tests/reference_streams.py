"""The slow, obvious simulator of requests with several streams: every stream has its own table, every block a count.

Written from the rules alone, as ``reference_loop``, whose buddy regions it uses; shares nothing with kvbench but
Request. Nothing is kept from step to step that could be counted again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbench.core import Request
from tests.reference_loop import NaiveBuddy, ceil_div, pow2

Parents = Callable[[int, int, int], Sequence[int] | None]
"""Request id, width, tokens generated before: beam i goes on from beam parents[i]; None: all survive."""


@dataclass(frozen=True)
class StreamCosts:
    """Milliseconds; with powers of two for coefficients every sum is exact, in whatever order."""

    a: float = 16.0
    b: float = 2.0**-10
    c: float = 0.25
    p: float = 2.0**-5
    q: float = 2.0**-14
    s: float = 2.0**-4
    beam: float = 2.0**-3
    copied_slot: float = 2.0**-6
    out_piece: float = 0.125
    out_slot: float = 2.0**-7
    in_piece: float = 0.25
    in_slot: float = 2.0**-8
    prefix_weight: float = 0.5
    weights: float = 8.0
    alone: float = 2.0**-4


@dataclass(eq=False)
class Stream:
    table: list[int] = field(default_factory=list)  # blocks; ~b: block b of the host pool
    region: tuple[int, int] | None = None  # reserved: (first block, blocks)


@dataclass(eq=False)
class Job:
    request: Request
    streams: list[Stream]
    generated: int = 0
    asked: int = 0  # slots asked for when it was admitted, for each stream
    num_prefills: int = 1
    cached: int = 0  # tokens of a shared prefix that it did not compute
    forked: list[tuple[Stream, Stream]] = field(default_factory=list)  # where nothing is shared: all to be copied
    finish_s: float | None = None
    rejected: bool = False
    preemptions: int = 0
    recomputed: int = 0
    left_s: float = 0.0
    without_memory_s: float = 0.0

    @property
    def length(self) -> int:
        return self.request.prompt_len + self.generated

    @property
    def final(self) -> int:
        return self.request.prompt_len + self.request.output_len


@dataclass
class Pool:
    """Blocks with the number of streams that hold each."""

    counts: list[int]

    @property
    def free(self) -> int:
        return self.counts.count(0)

    def take(self) -> int:
        block = self.counts.index(0)
        self.counts[block] = 1
        return block

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.counts[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.counts[block] -= 1


@dataclass
class Streamed:
    jobs: list[Job]
    rows: list[dict[str, float]] = field(default_factory=list)
    """For each iteration what the columns of a record of these names say."""
    num_partings: int = 0
    """How often a request was swapped out between a fork and the copy."""


@dataclass(frozen=True)
class Setting:
    """``system``: on_demand (paged), or max, pow2, oracle (buddy)."""

    system: str
    num_slots: int
    block_size: int
    host_slots: int | None = None
    copy_on_write: bool = True
    restore: str = "auto"
    max_model_len: int = 2048
    max_num_seqs: int = 2048
    max_num_batched_tokens: int = 2560
    watermark: float = 0.01


class World:
    """One run; a method for each thing that can happen."""

    def __init__(self, requests: list[Request], costs: StreamCosts, parents: Parents, setting: Setting) -> None:
        self.costs, self.parents, self.setting = costs, parents, setting
        self.size = setting.block_size
        self.on_demand = setting.system == "on_demand"
        self.shares = self.on_demand and setting.copy_on_write
        num_slots, host_slots = setting.num_slots, setting.host_slots
        self.pool = Pool([0] * (num_slots // self.size))
        self.host = Pool([0] * ((num_slots if host_slots is None else host_slots) // self.size))
        self.keep = int(setting.watermark * len(self.pool.counts)) if self.on_demand else 0
        self.buddy = NaiveBuddy(len(self.pool.counts), pow2(ceil_div(setting.max_model_len, self.size)))
        self.jobs = [Job(request, [Stream() for _ in range(request.num_seqs)]) for request in requests]
        self.arriving = deque(self.jobs)
        self.waiting: deque[Job] = deque()
        self.out: deque[Job] = deque()
        self.prefixes: dict[int, list[int]] = {}  # by length: blocks that are held for ever
        self.running: list[Job] = []  # in the order in which they were admitted or came back
        self.outcome = Streamed(self.jobs)
        self.now = 0.0
        self.copied = self.num_out = self.num_in = 0  # slots copied, blocks swapped out and in, by one call of `step`
        # Of calls that led to no iteration: blocks swapped out, the time that took, and how many were preempted.
        self.out_before, self.swap_s_before, self.preempted_before = 0, 0.0, 0

    def run(self, *, with_memory: bool = True) -> Streamed:
        """``with_memory=False`` skips the ledger, for timing."""
        self.with_memory = with_memory
        while self.arriving or self.waiting or self.running or self.out:
            if not (self.waiting or self.running or self.out):
                self.now = max(self.now, self.arriving[0].request.arrival_s)
            while self.arriving and self.arriving[0].request.arrival_s <= self.now:
                self.waiting.append(self.arriving.popleft())
            self.step()
        if self.outcome.rows:
            self.outcome.rows[-1]["swapped_out"] += self.out_before * self.size
            self.outcome.rows[-1]["num_preempted"] += self.preempted_before
            self.outcome.rows[-1]["swap_s"] += self.swap_s_before
        return self.outcome

    # memory ----------------------------------------------------------------------------------------------------------

    def make_writable(self, job: Job) -> None:
        """Each stream is about to write its newest token, the ``length``-th: into a block of its own."""
        for parent, child in job.forked:
            assert len(parent.table) == len(child.table)
            self.copied += len(parent.table) * self.size
        job.forked.clear()
        index, filled = divmod(job.length - 1, self.size)
        for stream in job.streams:
            if index == len(stream.table):
                stream.table.append(self.pool.take())
            elif self.pool.counts[stream.table[index]] > 1:
                self.pool.drop([stream.table[index]])
                stream.table[index] = self.pool.take()
                self.copied += filled

    def release(self, job: Job) -> None:
        job.forked.clear()
        for stream in job.streams:
            if stream.region:
                self.buddy.give(stream.region)
                stream.region = None
            self.pool.drop(stream.table)
            stream.table = []

    def leaving(self, job: Job) -> list[int]:
        """Its blocks that nobody else holds."""
        shared = self.prefixes.get(job.cached, [])
        return list(dict.fromkeys(b for stream in job.streams for b in stream.table if b not in shared))

    def move_out(self, job: Job) -> None:
        """Each block once, wherever several streams hold it."""
        where = {block: self.host.take() for block in self.leaving(job)}
        self.num_out += len(where)
        for stream in job.streams:
            self.pool.drop([block for block in stream.table if block in where])
            stream.table = [~where[block] if block in where else block for block in stream.table]

    def hosted(self, job: Job) -> list[int]:
        return list(dict.fromkeys(~block for stream in job.streams for block in stream.table if block < 0))

    def move_in(self, job: Job) -> None:
        where = {block: self.pool.take() for block in self.hosted(job)}
        self.num_in += len(where)
        self.host.drop(list(where))
        self.pool.drop(list(where.values()))
        for stream in job.streams:
            self.pool.hold([where[~block] for block in stream.table if block < 0])
            stream.table = [where[~block] if block < 0 else block for block in stream.table]

    # a step ----------------------------------------------------------------------------------------------------------

    def preempt(self) -> None:
        job = self.running.pop()
        job.preemptions += 1
        job.left_s = self.now
        needed = len(self.leaving(job))
        swap = self.setting.restore == "swap" or (self.setting.restore == "auto" and len(job.streams) > 1)
        if swap and self.host.counts and needed <= self.host.free:
            last = {stream.table[-1] for stream in job.streams}
            self.outcome.num_partings += (job.length - 1) % self.size > 0 and len(last) < len(job.streams)
            self.move_out(job)
            self.out.appendleft(job)
        else:
            self.release(job)
            self.waiting.appendleft(job)

    def serve_running(self) -> int:
        """Returns how many were preempted."""
        num_preempted = 0
        for job in list(self.running):
            while self.on_demand and job in self.running and self.pool.free < len(job.streams):
                self.preempt()
                num_preempted += 1
            if job not in self.running:
                break
            self.make_writable(job)
        return num_preempted

    def bring_back(self) -> None:
        while self.out:
            job = self.out[0]
            if len(self.running) + len(job.streams) > self.setting.max_num_seqs:
                break
            needed = len(self.hosted(job))
            if needed + len(job.streams) + self.keep > self.pool.free:
                if self.running:
                    break
                self.out.popleft()
                self.host.drop(self.hosted(job))
                for stream in job.streams:
                    self.pool.drop([block for block in stream.table if block >= 0])
                job.rejected = True
                continue
            self.out.popleft()
            self.move_in(job)
            job.asked = 0
            self.make_writable(job)
            self.running.append(job)
            job.without_memory_s += self.now - job.left_s

    def place(self, job: Job, asked: int) -> str:
        """Placed, later or never."""
        need, count = ceil_div(asked, self.size), len(job.streams)
        job.num_prefills = 1 if self.shares and job.generated == 0 else count
        job.cached = job.request.prefix_len if self.shares and job.num_prefills == 1 else 0
        if job.cached:
            return self.place_behind_prefix(job, need)
        if self.on_demand:
            if job.num_prefills * need + self.keep > self.pool.free:
                return self.later_or_never(job.num_prefills * need)
            for index, stream in enumerate(job.streams):
                if index < job.num_prefills:
                    stream.table = [self.pool.take() for _ in range(need)]
                else:
                    stream.table = job.streams[0].table.copy()
                    self.pool.hold(stream.table)
            return "placed"
        return self.place_regions(job, need)

    def place_regions(self, job: Job, need: int) -> str:
        empty = NaiveBuddy(len(self.pool.counts), self.buddy.largest)
        if None in [empty.take(need) for _ in job.streams]:
            return "never"
        before = self.buddy.free.copy()
        regions = [self.buddy.take(need) for _ in job.streams]
        for stream, region in zip(job.streams, regions, strict=True):
            if None in regions or region is None:
                self.buddy.free = before
                return "later"
            stream.region = region
            stream.table = list(range(region[0], sum(region)))
            self.pool.hold(stream.table)
        return "placed"

    def later_or_never(self, blocks: int) -> str:
        """Prefixes stay where they are, so nobody waits for them."""
        if blocks + self.keep > len(self.pool.counts):
            return "never"
        return "later" if self.running or self.out else "never"

    def place_behind_prefix(self, job: Job, need: int) -> str:
        """Whole blocks of the prefix are shared, the last one is copied as far as it is filled."""
        length = job.cached
        if length not in self.prefixes:
            blocks = ceil_div(length, self.size)
            if blocks + self.keep > self.pool.free:
                return self.later_or_never(blocks)
            self.prefixes[length] = [self.pool.take() for _ in range(blocks)]
        shared = self.prefixes[length][: length // self.size]
        need -= len(shared)
        if need + self.keep > self.pool.free:
            return self.later_or_never(need)
        self.copied += length % self.size
        self.pool.hold(shared)
        table = shared + [self.pool.take() for _ in range(need)]
        for stream in job.streams:
            stream.table = table.copy()
        for _ in job.streams[1:]:
            self.pool.hold(table)
        return "placed"

    def admit(self) -> list[Job]:
        decoding = sum(len(job.streams) for job in self.running)
        prefills: list[Job] = []
        while self.waiting and len(self.running) < self.setting.max_num_seqs:
            job = self.waiting[0]
            if len(job.streams) > self.setting.max_num_seqs:
                job.rejected = True
                self.waiting.popleft()
                continue
            if len(self.running) + len(job.streams) > self.setting.max_num_seqs:
                break
            if job.length > self.setting.max_num_batched_tokens:
                job.rejected = True
                self.waiting.popleft()
                continue
            if decoding + sum(other.length for other in prefills) + job.length > self.setting.max_num_batched_tokens:
                break
            asked = {
                "on_demand": 0,
                "max": self.setting.max_model_len,
                "pow2": min(job.request.prompt_len + pow2(job.request.output_len), self.setting.max_model_len),
                "oracle": min(job.final, self.setting.max_model_len),
            }[self.setting.system]
            asked = max(asked, job.length)
            placed = self.place(job, asked)
            if placed == "later":
                break
            self.waiting.popleft()
            if placed == "never":
                job.rejected = True
                continue
            job.asked = asked
            if job.generated:
                job.recomputed += job.num_prefills * (job.length - 1) - job.cached
                job.without_memory_s += self.now - job.left_s
            self.running.append(job)
            prefills.append(job)
        return prefills

    def swap_ms(self) -> float:
        costs, size = self.costs, self.size
        return self.num_out * (2 * costs.out_piece + size * costs.out_slot) + self.num_in * (
            2 * costs.in_piece + size * costs.in_slot
        )

    def iteration_ms(self, decodes: list[Job], prefills: list[Job]) -> float:
        costs = self.costs
        lengths = [job.length for job in prefills for _ in range(job.num_prefills)]
        found = [job.cached for job in prefills]
        tokens = sum(lengths) - sum(found)
        squares = sum(length * length for length in lengths) - sum(length * length for length in found)
        computing = costs.p * tokens + costs.q * squares
        if self.is_alone(decodes, prefills):
            computing = max(costs.weights, costs.alone * tokens + costs.q * squares) - costs.weights
        seqs = sum(len(job.streams) for job in decodes) + len(lengths)
        beams = sum(len(job.streams) - 1 for job in self.running if job.request.is_beam)
        return (
            costs.a
            + costs.b * sum(len(job.streams) * job.length for job in decodes)
            - costs.b * (1 - costs.prefix_weight) * sum(len(job.streams) * job.cached for job in decodes)
            + costs.c * len(self.running)
            + computing
            + costs.s * (seqs - len(self.running))
            + costs.beam * beams
            + costs.copied_slot * self.copied
        )

    def is_alone(self, decodes: list[Job], prefills: list[Job]) -> bool:
        """Nothing but one request that is computed again."""
        return not decodes and len(prefills) == 1 and prefills[0].generated > 0

    def recompute_ms(self, decodes: list[Job], prefills: list[Job]) -> float:
        """What the iteration takes beyond one in which those computed again would have decoded."""
        back = [job for job in prefills if job.generated]
        others = [job for job in prefills if job not in back]
        return max(0.0, self.iteration_ms(decodes, prefills) - self.iteration_ms([*decodes, *back], others))

    def memory(self) -> dict[str, int]:
        """What each slot of the pool holds, block by block; a block that several streams hold is looked at once."""
        size = self.size
        classes = dict.fromkeys(("token_states", "reserved", "overreserved", "padding"), 0)
        seen: dict[int, tuple[int, int]] = {}
        holds = 0
        for job in self.running:
            bounds = (job.length, job.final, max(job.final, 0 if self.on_demand else job.asked))
            for stream in job.streams:
                for index, block in enumerate(stream.table):
                    holds += 1
                    ends = [min(max(bound - index * size, 0), size) for bound in bounds]
                    if block in seen:
                        assert seen[block] == (index, ends[0]), "shared, but not as far as they are filled"
                        continue
                    seen[block] = (index, ends[0])
                    classes["token_states"] += ends[0]
                    classes["reserved"] += ends[1] - ends[0]
                    classes["overreserved"] += ends[2] - ends[1]
                    classes["padding"] += size - ends[2]
        for length, blocks in self.prefixes.items():
            classes["token_states"] += length - sum(seen.get(block, (0, 0))[1] for block in blocks)
            classes["padding"] += -length % size
            holds += len(blocks)
            seen |= dict.fromkeys(blocks, (0, 0))
        streams = [stream for job in (*self.running, *self.out) for stream in job.streams]
        holds += sum(block >= 0 for job in self.out for stream in job.streams for block in stream.table)
        counts = Counter(block for stream in streams for block in stream.table if block >= 0)
        counts.update(block for blocks in self.prefixes.values() for block in blocks)
        assert {block: count for block, count in enumerate(self.pool.counts) if count} == counts
        return classes | {"free": self.setting.num_slots - size * len(seen), "shared": size * (holds - len(seen))}

    def beams(self, job: Job) -> None:
        """The dropped beams give their blocks back; then survivors are forked in their place."""
        parents = self.parents(job.request.id, len(job.streams), job.generated - 1)
        pairs = [(job.streams[parent], job.streams[i]) for i, parent in enumerate(parents or ()) if parent != i]
        if not self.shares:
            job.forked = pairs
            return
        for _, child in pairs:
            self.pool.drop(child.table)
        for parent, child in pairs:
            child.table = parent.table[: ceil_div(job.length - 1, self.size)]
            self.pool.hold(child.table)

    def step(self) -> None:
        """Schedule, compute, retire."""
        self.copied = self.num_out = self.num_in = 0
        num_preempted = self.serve_running()
        if not num_preempted:
            self.bring_back()
        decodes = list(self.running)
        prefills = [] if num_preempted or self.out else self.admit()
        if not self.running:
            self.now += self.swap_ms() / 1e3
            self.out_before += self.num_out
            self.swap_s_before += self.swap_ms() / 1e3
            self.preempted_before += num_preempted
            return
        self.now += (self.iteration_ms(decodes, prefills) + self.swap_ms()) / 1e3
        row: dict[str, float] = {
            "end_s": self.now,
            "num_running": len(self.running),
            "num_seqs": sum(len(job.streams) for job in self.running),
            "num_waiting": len(self.waiting),
            "num_prefills": len(prefills),
            "num_preempted": num_preempted + self.preempted_before,
            "context_len": sum(len(job.streams) * job.length for job in decodes),
            "prefill_tokens": sum(job.num_prefills * job.length - job.cached for job in prefills),
            "copied": self.copied,
            "swapped_out": (self.num_out + self.out_before) * self.size,
            "swapped_in": self.num_in * self.size,
            "recomputed": sum(job.num_prefills * (job.length - 1) - job.cached for job in prefills if job.generated),
            "recompute_s": self.recompute_ms(decodes, prefills) / 1e3,
            "swap_s": self.swap_s_before + self.swap_ms() / 1e3,
        }
        self.out_before, self.swap_s_before, self.preempted_before = 0, 0.0, 0
        self.outcome.rows.append(row | self.memory() if self.with_memory else row)
        for job in list(self.running):
            job.generated += 1
            if job.generated == job.request.output_len:
                job.finish_s = self.now
                self.running.remove(job)
                self.release(job)
            elif job.request.is_beam and job.generated > 1:
                self.beams(job)

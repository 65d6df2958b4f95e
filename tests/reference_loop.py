"""The slow, obvious simulator that the engine is held against: no calendar, no cohorts, all recounted every step.

Written from the rules alone; shares nothing with kvbench but Request. One class of block bookkeeping per placement, as
plain as possible.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvbench.core import Request

POOL_CLASSES = ("token_states", "reserved", "overreserved", "padding", "free")


@dataclass(eq=False)
class Job:
    request: Request
    generated: int = 0
    blocks: int = 0  # how many blocks it holds
    asked: int = 0  # slots it asked for when it was admitted
    region: tuple[int, int] | None = None  # reserved: (first block, blocks)
    finish_s: float | None = None
    rejected: bool = False
    preemptions: int = 0

    @property
    def length(self) -> int:
        return self.request.prompt_len + self.generated

    @property
    def final(self) -> int:
        return self.request.prompt_len + self.request.output_len


@dataclass
class Outcome:
    finish_s: list[float | None]
    rows: list[tuple[float, int, int, tuple[int, ...]]] = field(default_factory=list)
    """For each iteration: its end, how many ran, how many waited, and the pool's partition in POOL_CLASSES order."""
    preemptions: int = 0
    iterations: int = 0


@dataclass(frozen=True)
class Costs:
    a: float
    b: float
    c: float
    p: float
    q: float
    c_large: float
    knee: int

    def seconds(self, context: int, count: int, lengths: list[int]) -> float:
        above = count - self.knee
        per_request = self.c * count if above <= 0 else self.c * self.knee + self.c_large * above
        return (
            self.a
            + self.b * context
            + per_request
            + self.p * sum(lengths)
            + self.q * sum(length * length for length in lengths)
        ) / 1e3


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class NaiveBuddy:
    """Buddy regions as a plain set of free (start, blocks) and a list for the LIFO order."""

    def __init__(self, blocks: int, largest: int) -> None:
        self.free: list[tuple[int, int]] = []  # newest last
        self.largest = 0
        start = 0
        carved = []
        size = largest
        while size:
            while blocks - start >= size:
                carved.append((start, size))
                self.largest = max(self.largest, size)
                start += size
            size //= 2
        self.free = carved[::-1]

    def take(self, need: int) -> tuple[int, int] | None:
        size = 1
        while size < need:
            size *= 2
        fitting = sorted({free for _, free in self.free if free >= size})
        if not fitting:
            return None
        index = max(i for i, (_, free) in enumerate(self.free) if free == fitting[0])
        start, free = self.free.pop(index)
        while free > size:
            free //= 2
            self.free.append((start + free, free))
        return start, size

    def give(self, region: tuple[int, int]) -> None:
        start, size = region
        while size < self.largest and (start ^ size, size) in self.free:
            self.free.remove((start ^ size, size))
            start, size = min(start, start ^ size), size * 2
        self.free.append((start, size))


def pow2(value: int) -> int:
    power = 1
    while power < value:
        power *= 2
    return power


def reference(
    requests: list[Request],
    costs: Costs,
    *,
    num_slots: int,
    system: str,
    block_size: int = 16,
    max_model_len: int = 2048,
    max_num_seqs: int = 2048,
    max_num_batched_tokens: int = 2560,
    watermark: float = 0.01,
    with_rows: bool = True,
) -> Outcome:
    """``system``: on_demand (paged), or max, pow2, oracle (buddy). ``with_rows=False`` skips the ledger, for timing."""
    on_demand = system == "on_demand"
    num_blocks = num_slots // block_size
    keep = int(watermark * num_blocks) if on_demand else 0
    buddy = NaiveBuddy(num_blocks, pow2(ceil_div(max_model_len, block_size)))
    jobs = [Job(request) for request in requests]
    arriving = deque(jobs)
    waiting: deque[Job] = deque()
    running: list[Job] = []
    outcome = Outcome([])
    now = 0.0

    free = num_blocks

    def preempt(job: Job) -> None:
        nonlocal free
        running.remove(job)
        waiting.appendleft(job)
        free += job.blocks
        job.blocks = 0
        job.preemptions += 1
        outcome.preemptions += 1

    while arriving or waiting or running:
        if not waiting and not running:
            now = max(now, arriving[0].request.arrival_s)
        while arriving and arriving[0].request.arrival_s <= now:
            waiting.append(arriving.popleft())

        preempted = False
        if on_demand:
            for job in list(running):
                if job not in running:
                    continue
                while free < 1:
                    preempted = True
                    victim = running[-1]
                    preempt(victim)
                    if victim is job:
                        break
                if job in running and job.blocks * block_size < job.length:
                    job.blocks += 1
                    free -= 1

        decodes = list(running)
        prefills: list[Job] = []
        while waiting and not preempted and len(running) < max_num_seqs:
            job = waiting[0]
            asked = {
                "on_demand": 0,
                "max": max_model_len,
                "pow2": min(job.request.prompt_len + pow2(job.request.output_len), max_model_len),
                "oracle": min(job.final, max_model_len),
            }[system]
            asked = max(asked, job.length)
            need = ceil_div(asked, block_size)
            never = need + keep > num_blocks if on_demand else pow2(need) > buddy.largest
            if job.length > max_num_batched_tokens:
                job.rejected = True
                waiting.popleft()
                continue
            if sum(other.length for other in prefills) + len(decodes) + job.length > max_num_batched_tokens:
                break
            if never:
                job.rejected = True
                waiting.popleft()
                continue
            if on_demand:
                if free - need < keep:
                    break
                job.blocks = need
            else:
                job.region = buddy.take(need)
                if job.region is None:
                    break
                job.blocks = job.region[1]
            free -= job.blocks
            job.asked = asked
            waiting.popleft()
            running.append(job)
            prefills.append(job)
        if not running:
            continue

        lengths = [job.length for job in prefills]
        now += costs.seconds(sum(job.length for job in decodes), len(running), lengths)

        outcome.iterations += 1
        classes = dict.fromkeys(POOL_CLASSES, 0)
        for job in running if with_rows else ():
            held = job.blocks * block_size
            over = 0 if on_demand else max(0, job.asked - job.final)
            padding = max(0, held - max(job.final, 0 if on_demand else job.asked))
            classes["token_states"] += job.length
            classes["overreserved"] += over
            classes["padding"] += padding
            classes["reserved"] += held - job.length - over - padding
        classes["free"] = num_slots - (num_blocks - free) * block_size
        if with_rows:
            outcome.rows.append((now, len(running), len(waiting), tuple(classes.values())))

        for job in list(running):
            job.generated += 1
            if job.generated == job.request.output_len:
                job.finish_s = now
                running.remove(job)
                free += job.blocks
                if job.region:
                    buddy.give(job.region)
    outcome.finish_s = [job.finish_s for job in jobs]
    return outcome


def reference_request_level(
    requests: list[Request],
    costs: Costs,
    *,
    num_slots: int,
    session_len: int,
    batch_size: int,
    max_padded_len: int = 2040,
) -> Outcome:
    """Slabs; a batch starts together, is padded to its longest prompt and ends with its longest output."""
    limit = min(max_padded_len, session_len)
    jobs = [Job(request) for request in requests]
    queue = list(jobs)
    outcome = Outcome([])
    now = 0.0
    while queue:
        now = max(now, queue[0].request.arrival_s)
        batch: list[Job] = []
        while queue and queue[0].request.arrival_s <= now and len(batch) < min(batch_size, num_slots // session_len):
            job = queue[0]
            if job.final > session_len:
                job.rejected = True
                queue.pop(0)
                continue
            longest = [max(getattr(j.request, name) for j in [*batch, job]) for name in ("prompt_len", "output_len")]
            if batch and sum(longest) > limit:
                break
            batch.append(queue.pop(0))
        if not batch:
            continue
        prompt = max(job.request.prompt_len for job in batch)
        output = max(job.request.output_len for job in batch)
        count = len(batch)
        for step in range(output):
            lengths = [prompt] * count if step == 0 else []
            now += costs.seconds(count * (prompt + step) if step else 0, count, lengths)
            waiting = sum(job.request.arrival_s <= outcome.rows[-1][0] for job in queue) if step else None
            live = [job for job in batch if job.request.output_len > step]
            classes = dict.fromkeys(POOL_CLASSES, 0)
            classes["token_states"] = sum(job.request.prompt_len + step for job in live)
            classes["reserved"] = sum(job.final for job in live) - classes["token_states"]
            classes["overreserved"] = count * session_len - sum(job.final for job in live)
            classes["free"] = num_slots - count * session_len
            outcome.rows.append((now, count, -1 if waiting is None else waiting, tuple(classes.values())))
        for job in batch:
            job.finish_s = now
    outcome.finish_s = [job.finish_s for job in jobs]
    return outcome

"""Engine, scheduler, runner and ledger in one compiled function. See the package for what it covers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvbench.compiled.pools import (
    NONE,
    buddy_give_back,
    buddy_largest,
    buddy_pool,
    buddy_take,
    extent_give_back,
    extent_pool,
    extent_take,
)

PAGED, BUDDY, FIRST_FIT = 0, 1, 2
NUM_COUNTS = 11
"""Integers of a row: those of a stored ledger row, in order, and the tokens that were computed again."""
NUM_SECONDS = 3
"""Floats of a row: its end, what it took, and of that what computing again cost."""


@njit(cache=True)
def run(
    arrivals: Any,
    prompt_lens: Any,
    output_lens: Any,
    reserved: Any,
    costs: Any,
    kind: int,
    num_slots: int,
    block_size: int,
    max_order: int,
    grows: bool,
    foresees: bool,
    keep: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Any:
    """Serve requests to the end.

    Args:
        arrivals: seconds, ascending, ``[requests]``, as are the three lengths.
        prompt_lens: tokens.
        output_lens: tokens.
        reserved: slots guaranteed at admission; less than the tokens present where it grows.
        costs: ``Simulated.coefficients()``.
        kind: PAGED, BUDDY or FIRST_FIT.
        num_slots: of the pool.
        block_size: in slots.
        max_order: of the largest region of a buddy heap.
        grows: whether sequences ask for more.
        foresees: whether none is admitted that would not find room to its end.
        keep: slots that admission leaves free.
        max_num_seqs: limit of the scheduler.
        max_num_batched_tokens: limit of the scheduler.

    Returns:
        Whether all was served; if not, the rest means nothing. Then rows, ``[iterations, NUM_SECONDS]`` and
        ``[iterations, NUM_COUNTS]``; by request first token, finish and seconds without a place, ``[3, requests]``,
        and preemptions and tokens computed again, ``[2, requests]``.
    """
    a, b, c, c_large, p, q, alone, weights, knee = costs
    num_requests = len(arrivals)
    num_blocks = num_slots // block_size
    free = num_blocks  # paged only
    heap = buddy_pool(num_blocks if kind == BUDDY else 1, max_order)
    extents = extent_pool(num_blocks * block_size, max_num_seqs if kind == FIRST_FIT else 1)
    starts, grants = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)

    final_lens = prompt_lens + output_lens
    horizon = 1
    while horizon <= final_lens.max() + 1:
        horizon *= 2
    lengths = prompt_lens.copy()
    origins, over_by = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    pad_by, pad_steps = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    times = np.full((3, num_requests), -1.0)
    times[2] = 0.0
    first_token_s, finish_s, preempted_s = times[0], times[1], times[2]
    left_s = np.zeros(num_requests)
    counts = np.zeros((2, num_requests), np.int64)
    num_preemptions, recomputed_tokens = counts[0], counts[1]

    # Running sequences in service order, and those that end at a step: doubly linked lists.
    after, before = np.full(num_requests, NONE, np.int64), np.full(num_requests, NONE, np.int64)
    end_after, end_before = np.full(num_requests, NONE, np.int64), np.full(num_requests, NONE, np.int64)
    head = tail = NONE
    num_running = 0
    end_heads, end_tails = np.full(horizon, NONE, np.int64), np.full(horizon, NONE, np.int64)
    preempted = np.empty(num_requests, np.int64)  # those at the front of the queue, the last of these first
    num_back = 0
    upcoming = fresh = 0  # next to arrive; next that arrived and was never admitted

    cohorts = np.zeros(block_size, np.int64)  # by step modulo the block size
    pads = np.zeros(horizon, np.int64)  # by step: slots of last blocks that will never be filled
    held = np.zeros(horizon if foresees else 1, np.int64)  # by step: blocks that will be held
    context_len = overreserved = padding = 0
    step = 0
    blocked = False
    skipped = 0  # preemptions of steps without an iteration

    capacity = 1 << 12
    seconds_rows = np.zeros((capacity, NUM_SECONDS))
    count_rows = np.zeros((capacity, NUM_COUNTS), np.int64)
    num_rows = 0
    now = 0.0
    while True:
        while upcoming < num_requests and arrivals[upcoming] <= now:
            upcoming += 1
        num_waiting = num_back + upcoming - fresh
        if num_running == 0 and num_waiting == 0:
            if upcoming == num_requests:
                break
            now = max(now, arrivals[upcoming])
            continue

        # Room for the running: for all at once, or in service order while the newest give up theirs.
        num_preempted = 0
        due = cohorts[step % block_size]
        if grows and due and due < free:
            free -= due
        elif grows and num_running:
            served = NONE
            short = free < 1
            while True:
                if short:
                    seq = tail
                    tail = before[seq]
                    if tail == NONE:
                        head = NONE
                    else:
                        after[tail] = NONE
                    num_running -= 1
                    origin = origins[seq]
                    lengths[seq] = step - origin
                    context_len -= step - origin
                    free += -(-(step - 1 - origin) // block_size)
                    cohorts[(origin + 1) % block_size] -= 1
                    if pad_steps[seq] < step:
                        padding -= pad_by[seq]
                    else:
                        pads[pad_steps[seq] % horizon] -= pad_by[seq]
                    _unlink(end_heads, end_tails, end_after, end_before, (origin + final_lens[seq] - 1) % horizon, seq)
                    num_preemptions[seq] += 1
                    left_s[seq] = now
                    preempted[num_back] = seq
                    num_back += 1
                    num_preempted += 1
                    blocked = False
                seq = head if served == NONE else after[served]
                while seq != NONE and due and (step - origins[seq]) % block_size != 1 % block_size:
                    seq = after[seq]
                if seq == NONE or not due:
                    break
                free -= 1
                served = seq
                short = free < 1 and served != tail
        num_decodes = num_running
        batch_context_len = context_len

        # Admission.
        num_prefills = 0
        prefill_len = square_len = 0
        num_recomputed = 0
        recompute_ms = 0.0
        again = NONE
        if num_waiting and not blocked and num_preempted == 0:
            num_tokens = num_running
            num_places = max_num_seqs - num_running
            while num_prefills < num_places and (num_back or fresh < upcoming):
                seq = preempted[num_back - 1] if num_back else fresh
                length = lengths[seq]
                if num_tokens + length > max_num_batched_tokens:
                    if length > max_num_batched_tokens:
                        return False, seconds_rows, count_rows, times, counts
                    break
                slots = max(reserved[seq], length)
                if kind == PAGED:
                    need = -(-(slots + keep) // block_size)
                    most = -(-(final_lens[seq] - 1) // block_size) + 1 if foresees else need
                    if max(need, most) > num_blocks:
                        return False, seconds_rows, count_rows, times, counts
                    fits = need <= free
                    grant = -(-slots // block_size)
                    if foresees:
                        for i in range(final_lens[seq] - length):
                            if held[(step + i) % horizon] - (-(length + i) // block_size) >= num_blocks:
                                fits = False
                                break
                elif kind == BUDDY:
                    order = 0
                    while block_size << order < slots:
                        order += 1
                    need = (1 << order) + keep // block_size
                    if order > heap[4][0] or need > num_blocks:
                        return False, seconds_rows, count_rows, times, counts
                    fits = order <= buddy_largest(heap) and need <= heap[4][1]
                    grant = order
                else:
                    grant = -(-slots // block_size) * block_size
                    if grant + keep > num_blocks * block_size:
                        return False, seconds_rows, count_rows, times, counts
                    fits = grant <= extents[2][1] and grant + keep <= extents[2][2]
                if not fits:
                    blocked = not foresees
                    break
                grants[seq] = grant
                if foresees:
                    for i in range(final_lens[seq] - length):
                        held[(step + i) % horizon] += -(-(length + i) // block_size)
                if kind == PAGED:
                    free -= grant
                    granted = grant * block_size
                elif kind == BUDDY:
                    starts[seq] = buddy_take(heap, grant)
                    granted = block_size << grant
                else:
                    starts[seq] = extent_take(extents, grant)
                    granted = grant
                if num_back:
                    num_back -= 1
                else:
                    fresh += 1
                num_tokens += length
                origin = origins[seq] = step - length
                final_len = final_lens[seq]
                if grows:
                    cohorts[(origin + 1) % block_size] += 1
                # Its place in service, and its end.
                before[seq], after[seq] = tail, NONE
                if tail == NONE:
                    head = seq
                else:
                    after[tail] = seq
                tail = seq
                num_running += 1
                context_len += length
                ending = (origin + final_len - 1) % horizon
                last = end_tails[ending]
                end_before[seq], end_after[seq] = last, NONE
                if last == NONE:
                    end_heads[ending] = seq
                else:
                    end_after[last] = seq
                end_tails[ending] = seq
                # What of its grant will never be filled.
                over_by[seq] = max(slots - final_len, 0)
                overreserved += over_by[seq]
                pad, pad_step = granted - max(slots, final_len), step
                if pad < 0:  # it will ask for its last block, unless only its last token would lie there
                    num_full = -(-final_len // block_size)
                    pad = num_full * block_size - final_len
                    pad_step = origin + (num_full - 1) * block_size + 1
                    if pad_step == origin + final_len:
                        pad = 0
                pad_by[seq], pad_steps[seq] = pad, pad_step
                pads[pad_step % horizon] += pad
                num_prefills += 1
                prefill_len += length
                square_len += length * length
                if num_preemptions[seq]:
                    again = seq
                    recompute_ms += p * length + q * (length * length) - b * length
        if num_running == 0:
            if num_preempted == 0:
                return False, seconds_rows, count_rows, times, counts
            skipped += num_preempted
            continue

        # What it takes.
        size = num_decodes + num_prefills
        above = size - knee
        per_request = c * size if above <= 0 else c * knee + c_large * above
        ms = a + b * batch_context_len + per_request
        if num_prefills:
            ms += p * prefill_len
            ms += q * square_len
            if again != NONE and size == 1 and alone:
                mixed_ms = ms
                length = lengths[again]
                ms = (a - weights + c) + max(weights, alone * length + q * (length * length))
                recompute_ms += ms - mixed_ms
            recompute_ms = max(0.0, recompute_ms)
        scheduled_s = now
        now += ms / 1e3

        # The row.
        padding += pads[step % horizon]
        pads[step % horizon] = 0
        if num_rows == capacity:
            capacity *= 2
            seconds_rows, count_rows = _longer(seconds_rows, capacity), _longer(count_rows, capacity)
        row = count_rows[num_rows]
        row[0] = num_running
        row[1] = num_back + upcoming - fresh
        row[2] = num_prefills
        row[3] = num_preempted + skipped
        row[4] = batch_context_len
        row[5] = context_len
        row[6] = overreserved
        row[7] = padding
        if kind == PAGED:
            row[8] = (num_blocks - free) * block_size
            row[9] = free * block_size
        elif kind == BUDDY:
            row[8] = (num_blocks - heap[4][1]) * block_size
            order = buddy_largest(heap)
            row[9] = 0 if order == NONE else block_size << order
        else:
            row[8] = num_blocks * block_size - extents[2][2]
            row[9] = extents[2][1]
        skipped = 0
        seq = tail
        for _ in range(num_prefills):  # the admitted, newest first
            if first_token_s[seq] < 0:
                first_token_s[seq] = now
            else:
                recomputed_tokens[seq] += lengths[seq] - 1
                num_recomputed += lengths[seq] - 1
                preempted_s[seq] += scheduled_s - left_s[seq]
            seq = before[seq]
        row[10] = num_recomputed
        seconds_rows[num_rows, 0] = now
        seconds_rows[num_rows, 1] = ms / 1e3
        seconds_rows[num_rows, 2] = recompute_ms / 1e3 if num_recomputed else 0.0
        num_rows += 1

        # Those that are done leave.
        context_len += num_running
        if foresees:
            held[step % horizon] = 0
        step += 1
        ending = (step - 1) % horizon
        seq = end_heads[ending]
        while seq != NONE:
            finish_s[seq] = now
            context_len -= step - origins[seq]
            previous, following = before[seq], after[seq]
            if previous == NONE:
                head = following
            else:
                after[previous] = following
            if following == NONE:
                tail = previous
            else:
                before[following] = previous
            num_running -= 1
            if grows:
                cohorts[(origins[seq] + 1) % block_size] -= 1
                free += -(-(step - 1 - origins[seq]) // block_size)
            elif kind == PAGED:
                free += grants[seq]
            elif kind == BUDDY:
                buddy_give_back(heap, starts[seq], grants[seq])
            else:
                extent_give_back(extents, starts[seq], grants[seq])
            overreserved -= over_by[seq]
            padding -= pad_by[seq]
            blocked = False
            seq = end_after[seq]
        end_heads[ending] = end_tails[ending] = NONE
    if skipped and num_rows:
        count_rows[num_rows - 1, 3] += skipped
    return True, seconds_rows[:num_rows], count_rows[:num_rows], times, counts


@njit(cache=True)
def _unlink(heads: Any, tails: Any, after: Any, before: Any, where: int, seq: int) -> None:
    previous, following = before[seq], after[seq]
    if previous == NONE:
        heads[where] = following
    else:
        after[previous] = following
    if following == NONE:
        tails[where] = previous
    else:
        before[following] = previous


@njit(cache=True)
def _longer(rows: Any, capacity: int) -> Any:
    longer = np.zeros((capacity, rows.shape[1]), rows.dtype)
    longer[: len(rows)] = rows
    return longer

# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # An allocator of your own
#
# An idea, fifty lines, a verdict of the conformance suite, and a figure beside vLLM. The idea: vLLM's sequences ask
# for a block every 16 tokens. **What if they get several blocks at a time?** The pool is asked less often, tables
# grow in longer pieces, but more memory lies empty.
#
# Everything is simulated; the whole page takes well under a minute.

# %%
from importlib import import_module, reload
from pathlib import Path

from IPython.display import display
from matplotlib_inline.backend_inline import set_matplotlib_formats

import kvbench
from kvbench.app import main as run
from kvbench.figures import comparison, fig_memory_waste, style
from kvbench.verify import main as verify

set_matplotlib_formats("retina", bbox_inches=None)
RESULTS = Path("../results")

# %% [markdown]
# ## Write it
#
# An allocator counts slots: it knows neither tensors, nor time, nor how long a request will be. Its verbs are those
# of `kvbench/allocators/base.py`; `FixedGrant` answers those that it does not have (sharing, swapping). Each applies
# fully, or raises and changes nothing. The cell writes a file, as worker processes import it.

# %%
# %%writefile grow_ahead.py
"""Blocks ahead of need: the pool is asked less often, and more of it lies empty."""

from kvbench.allocators.base import Ability, AllocationError, FixedGrant
from kvbench.core import Fit, Usage


class GrowAhead(FixedGrant):
    """Block tables that grow by ``growth`` blocks at a time, by fewer where the pool has not as many."""

    abilities = Ability.ANY_SIZE | Ability.GROW

    def __init__(self, num_slots, block_size=16, growth=4):
        self.num_slots, self.block_size, self.growth = num_slots, block_size, growth
        self.num_blocks = num_slots // block_size
        self.empty = list(range(self.num_blocks))
        self.tables = {}  # sequence -> its blocks

    def _take(self, num_blocks):
        if num_blocks > len(self.empty):
            raise AllocationError((num_blocks - len(self.empty)) * self.block_size)
        return [self.empty.pop() for _ in range(num_blocks)]

    def can_allocate(self, slots, keep=0, count=1):
        need = count * -(-slots // self.block_size) + keep // self.block_size
        if need > self.num_blocks:
            return Fit.NEVER
        return Fit.OK if need <= len(self.empty) else Fit.LATER

    def allocate(self, seq, slots):
        if seq in self.tables or slots < 1:
            raise ValueError(f"{seq!r} holds slots already, or asks for none")
        self.tables[seq] = self._take(-(-slots // self.block_size))
        return len(self.tables[seq]) * self.block_size

    def can_append(self, num_seqs):
        return num_seqs <= len(self.empty)

    def append(self, seqs, copies):
        tables = [self.tables[seq] for seq in seqs]
        each = max(1, min(self.growth, len(self.empty) // len(tables)))
        taken = self._take(each * len(tables))
        for table in tables:
            table += [taken.pop() for _ in range(each)]
        return each * self.block_size  # tokens that each can write before it asks again

    def free(self, seq):
        self.empty += reversed(self.tables.pop(seq))

    def slots(self, seq):
        return [block * self.block_size + i for block in self.tables[seq] for i in range(self.block_size)]

    def usage(self):
        free = self.num_slots - (self.num_blocks - len(self.empty)) * self.block_size
        return Usage(self.num_slots - free, free, len(self.empty) * self.block_size)


# %% [markdown]
# ## Verify it
#
# The suite runs random calls against a shadow of the memory and tries to break every law of the protocol. What an
# allocator does not declare in `abilities` is not asked. (Break something: let `append` take blocks before it has
# looked whether there are enough.)

# %%
reload(import_module("grow_ahead"))  # so that an edited class counts
assert verify(["grow_ahead:GrowAhead", "--examples=50"]) == 0

# %% [markdown]
# ## Run it
#
# `allocator._target_=` puts a class in the place of another. That of `first_fit` fits: its only option is
# `block_size`, and `+` adds our own. With `growth=1` it has to do exactly what vLLM's does, a check that costs
# nothing.

# %%
RATES = "workload.request_rate=1,1.4,1.6,1.8,2,2.2"
COMMON = ["-m", "model=opt_13b", "workload=sharegpt", "workload.duration_s=300", RATES, f"results_dir={RESULTS}"]
OURS = ["allocator=first_fit", "allocator._target_=grow_ahead.GrowAhead", "allocator.block_size=16"]
assert run([*COMMON, "system=vllm", "name=own_allocator_vllm"]) == 0
assert run([*COMMON, "system=vllm", *OURS, "+allocator.growth=1,4,16", "name=own_allocator"]) == 0

# %%
points = kvbench.load([RESULTS / "own_allocator_vllm", RESULTS / "own_allocator"])
growth = points["system"].str.extract(r"growth=(\d+)")[0]
points["system"] = ("growth=" + growth).fillna("vllm")  # shorter than `vllm[allocator=...]`
points["results"] = "own_allocator"
latency = points.pivot(index="request_rate", columns="system", values="normalized_latency_mean_s")
assert (latency["growth=1"] == latency["vllm"]).all()
latency.round(4)

# %% [markdown]
# ## Into the figures

# %%
others = points[points["system"] != "growth=1"]
with style.context():
    display(comparison.draw(others, "request_rate", "normalized_latency_mean_s", width_in=style.PAGE_IN))
    display(comparison.draw(others, "request_rate", "num_preemptions", width_in=style.PAGE_IN))

# %% [markdown]
# Where the memory goes, in the segments of the paper's Figure 2. What a sequence holds ahead and will fill counts as
# *reservation*, what it will not as *external & others*:

# %%
loaded = points[points["request_rate"] == 1.8]
names = {"vllm": "vLLM", "growth=1": "growth=1", "growth=4": "growth=4", "growth=16": "growth=16"}
with style.context():
    groups = {label: loaded[loaded["system"] == name] for name, label in names.items()}
    display(fig_memory_waste.draw_groups(groups, width_in=style.PAGE_IN))

# %% [markdown]
# To keep it, see *Adding an allocator* in `CONTRIBUTING.md`: one file, one YAML, one line in the test matrix.

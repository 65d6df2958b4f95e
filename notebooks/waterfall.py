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
# # Where the gain comes from
#
# vLLM serves more requests than Orca (Oracle), although the latter knows every output's length. The comparison
# changes three things at once: sizes are no longer **rounded** to powers of two, a sequence need no longer lie in
# **one piece**, and memory is given **on demand**. kvbench changes them one at a time.
#
# This is `make fig_waterfall` in small: one panel, ten minutes of requests instead of an hour, four repeats instead
# of eight; simulated.

# %%
from pathlib import Path

from IPython.display import display
from matplotlib_inline.backend_inline import set_matplotlib_formats

import kvbench
from kvbench.app import main as run
from kvbench.figures import fig_memory_waste, fig_waterfall, style
from kvbench.results import Results

set_matplotlib_formats("retina", bbox_inches=None)
RESULTS = Path("../results")

# %% [markdown]
# ## Each system's capacity
#
# The rate at which the mean latency of a trace reaches 0.2 s/token is found by bisection, of each system in each
# repeat. All serve the same requests, so that ratios are paired and their intervals are narrow though those of the
# rates are not.

# %%
SMALL = ["panel=a", "workload.duration_s=600", "repeats=4", "name=waterfall", f"results_dir={RESULTS}"]
assert run(["+experiment=fig_waterfall", *SMALL]) == 0

# %% [markdown]
# The factors multiply to the whole gain, and the rows below the line are bounds: what admission could do at best if
# it knew the future, what the engine could if no slot were ever empty, and what the GPUs could.

# %%
results = Results(RESULTS / "waterfall")
with style.context():
    for figure in fig_waterfall.draw(results).values():
        figure.set_figwidth(style.PAGE_IN)
        display(figure)

# %% [markdown]
# ## What each step changes in memory
#
# All systems under one load, above what any of them serves: the ledger's shares of the pool. Rounding is *external &
# others*, as are holes that are too small; a reservation that waits to be filled is *reservation*.

# %%
# %%capture
STEPS = {
    "orca_oracle": ["system=orca_oracle"],
    "first_fit": ["system=vllm", "reservation=oracle", "allocator=first_fit"],
    "paged": ["system=vllm", "reservation=oracle"],
    "vllm": ["system=vllm"],
}
LOAD = [
    "model=opt_13b",
    "records=summary",
    "workload.request_rate=3",
    "workload.duration_s=300",
    "measure_from_s=100",
    "measure_to_s=300",
]
for name, options in STEPS.items():
    assert run([*LOAD, *options, f"results_dir={RESULTS / 'waterfall_memory'}", f"name={name}"]) == 0

# %%
LABELS = ["Orca (Oracle)", "no rounding", "no contiguity: blocks", "on demand: vLLM"]
groups = dict(zip(LABELS, (kvbench.load(RESULTS / "waterfall_memory" / name) for name in STEPS), strict=True))
with style.context():
    display(fig_memory_waste.draw_groups(groups, width_in=style.PAGE_IN))

# %% [markdown]
# Other orders of the axes, and other axes (watermark, block size, victim, restore): `make fig_waterfall ARGS='panel=a
# axes=placement,reservation,block_size'` averages over every order that exists; `--dry-run` says how long it takes.

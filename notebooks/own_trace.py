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
# # Your own requests, any set of allocators
#
# Which KV-cache memory strategy suits *your* load? Bring a CSV with one line for each request: when it arrives
# (seconds), how long its prompt is and how long its output (tokens). Here we write a small one: short chats, and
# every now and then a burst of long documents. Everything is simulated, OPT-13B on one A100; change `MODEL` for
# another (`python -m kvbench --help` lists them).

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib_inline.backend_inline import set_matplotlib_formats

import kvbench
from kvbench.app import main as run
from kvbench.figures import comparison, fig_memory_waste, style

set_matplotlib_formats("retina", bbox_inches=None)
RESULTS = Path("../results/own_trace")
RESULTS.mkdir(parents=True, exist_ok=True)
TRACE = RESULTS / "my_trace.csv"
MODEL = ["model=opt_13b", "hardware=a100_40gb", "executor=serial"]  # one process: the trace is small

# %%
random = np.random.default_rng(0)
chats = pd.DataFrame(
    {
        "arrival": random.exponential(0.8, 450).cumsum(),
        "prompt": random.lognormal(4.5, 0.8, 450),
        "output": random.lognormal(5.3, 0.7, 450),
    }
)
documents = pd.DataFrame(
    {
        "arrival": np.repeat([60, 180, 300], 20) + random.uniform(0, 5, 60),
        "prompt": random.uniform(900, 1500, 60),
        "output": random.uniform(50, 300, 60),
    }
)
trace = pd.concat([chats, documents]).sort_values("arrival")
trace[["prompt", "output"]] = trace[["prompt", "output"]].clip(1, 1000).astype(int)
trace.to_csv(TRACE, index=False)
trace.describe().round(1)

# %% [markdown]
# ## Run
#
# A system is a list of options, as on the command line: a preset (`system=`), or any placement (`allocator=`) under
# any rule of how much is reserved (`reservation=`). Each is run at several rates; `workload.request_rate=` stretches
# the trace's time to that mean rate, and without it the times are as recorded. `-m` multiplies comma lists. The same
# command again uses what is finished.

# %%
# %%capture
SYSTEMS = {
    "orca_max": ["system=orca_max"],
    "orca_oracle": ["system=orca_oracle"],
    "first_fit_oracle": ["system=vllm", "reservation=oracle", "allocator=first_fit"],
    "vllm_blocks_of_128": ["system=vllm", "allocator.block_size=128"],
    "vllm": ["system=vllm"],
}
RATES = "workload.request_rate=0.5,1,1.5,2,2.5,3"
for name, options in SYSTEMS.items():
    command = ["-m", *MODEL, "workload=trace", f"workload.path={TRACE}", RATES, *options]
    assert run([*command, f"results_dir={RESULTS}", f"name={name}"]) == 0

# %% [markdown]
# ## Latency, throughput, and what the pool holds
#
# `kvbench.load` reads any number of folders into one typed table; `.attrs["units"]` has the units. `comparison.draw`
# draws it in the style of the figures, any metric along any axis.

# %%
points = kvbench.load([RESULTS / name for name in SYSTEMS])
points["system"] = points["results"].map(lambda folder: Path(folder).name)
points["results"] = "own_trace"
points.pivot(index="request_rate", columns="system", values="normalized_latency_mean_s").round(3)

# %%
with style.context():
    for metric in ("normalized_latency_mean_s", "throughput_tok_per_s"):
        display(comparison.draw(points, "request_rate", metric, width_in=style.PAGE_IN))

# %% [markdown]
# Where the memory goes at one of the rates, as in the paper's Figure 2:

# %%
RATE = 2.5
loaded = points[points["request_rate"] == RATE]
labels = {name: look.label for name, look in style.looks(SYSTEMS).items()}
with style.context():
    groups = {labels[name]: loaded[loaded["system"] == name] for name in labels}
    display(fig_memory_waste.draw_groups(groups, width_in=style.PAGE_IN))

# %% [markdown]
# ## Iteration by iteration
#
# `kvbench.load(..., "steps")` has a row for each iteration, `"requests"` one for each request. The queue shows what
# the bursts do:

# %%
steps = kvbench.load([RESULTS / name for name in SYSTEMS], "steps")
steps = steps[steps["point"].isin(loaded["point"])]
with style.context():
    figure, axes = plt.subplots(figsize=(style.PAGE_IN, 2.4), layout="constrained")
    for name, look in style.looks(SYSTEMS).items():
        mine = steps[steps["results"] == str(RESULTS / name)]
        axes.plot(mine["end_s"], mine["num_waiting"], color=look.color, linestyle=look.linestyle, label=look.label)
    axes.set(xlabel="Time (s)", ylabel="Requests waiting", title=f"{RATE:g} requests/s, simulated")
    axes.legend()
    plt.show()

# %% [markdown]
# For a paper: `python -m kvbench.compare results/own_trace/* --to FOLDER` writes figure and table as PDF, SVG, PNG,
# LaTeX and Markdown.

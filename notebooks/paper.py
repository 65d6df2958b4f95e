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
# # The paper's story, figure by figure
#
# Kwon et al., *Efficient Memory Management for Large Language Model Serving with PagedAttention*, SOSP 2023: every
# figure of its evaluation that `results/reference` holds, beside the paper's own points. In all figures **filled** is
# kvbench and **hollow** is the paper; everything is **simulated**, and the small print says from which requests.
# Nothing is run here: it takes seconds.
#
# Below each figure stand the paper's claims on it, the range it claims, what kvbench found, and a verdict within the
# tolerance that was fixed beforehand. Why one is *not comparable* is in the column `note` of `claims.csv`.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Image, Markdown, display
from matplotlib_inline.backend_inline import set_matplotlib_formats

import kvbench
from kvbench.figures import style
from kvbench.paper.points import latency_panels

set_matplotlib_formats("retina")
pd.set_option("display.precision", 3, "display.max_colwidth", None)
RESULTS = Path("../results")
REFERENCE = RESULTS / "reference"
shown = []


def find(experiment):
    """The committed results of an experiment, of the paper's own requests if there are any; else this machine's."""
    places = [REFERENCE / f"{experiment}_pairs", REFERENCE / experiment, RESULTS / experiment]
    return next((place for place in places if (place / "claims.csv").is_file()), None)


def show(experiment, matching=""):
    """An experiment's figures, and the claims on it that match a pattern."""
    shown.append(experiment)
    folder = find(experiment)
    if folder is None:
        display(Markdown(f"*Not among the committed results: `make {experiment}` adds it to this page.*"))
        return
    for path in sorted(folder.glob("*.png")):
        display(Image(path))
    claims = pd.read_csv(folder / "claims.csv")
    claims = claims[claims["claim"].str.contains(matching)]
    display(claims.set_index(["figure", "claim"])[["paper_low", "paper_high", "measured", "unit", "verdict"]])


# %% [markdown]
# ## Memory is what limits the batch
#
# **Figure 1, left; Table 1.** Weights take most of a GPU. What is left for the KV cache holds a few thousand tokens.

# %%
show("fig_memory_layout")

# %% [markdown]
# **Figure 1, right.** A system that reserves the maximum for each request is full with a handful of them; one that
# reserves nothing goes on, and throughput with it.

# %%
show("fig_memory_growth")

# %% [markdown]
# **Figure 2.** Where the memory goes. Of a pool under full load Orca (Max) fills a fifth with tokens, and even Orca
# (Oracle), which knows how long every output will be, less than half. Blocks leave a few percent unused.

# %%
show("fig_memory_waste")

# %% [markdown]
# ## The requests
#
# **Figure 11.** ShareGPT's conversations are long and vary, Alpaca's instructions are short.

# %%
show("fig_lengths")

# %% [markdown]
# ## More requests at the same latency
#
# **Figure 12**, the paper's main result. Latency stays flat until the queue grows; how far to the right that happens
# is what a system can serve. FasterTransformer also batches differently, so it is not memory alone that sets it
# apart.

# %%
show("fig_throughput", " sustains | gain |improves")

# %% [markdown]
# The numbers behind it are a table, and the paper's points are data too. The first panel once more, on a logarithmic
# axis:

# %%
panel = latency_panels("fig12")["a"]
points = kvbench.load(find("fig_throughput"))
points = points[points["panel"] == "a"]
with style.context():
    figure, axes = plt.subplots(figsize=(style.PAGE_IN, 3), layout="constrained")
    for system, look in style.looks(points["system"]).items():
        mine = points[points["system"] == system].sort_values("request_rate")
        style.plot(axes, mine[["request_rate", "normalized_latency_mean_s"]].to_numpy(), look)
        papers = [(point.x, point.y) for point in panel.curves[system].measurements]
        style.plot_hollow(axes, papers, look.color, look.marker)
    handles = [*style.legend(style.looks(points["system"])), style.hollow("o")]
    figure.legend(handles=handles, loc="outside upper center", ncols=6)
    axes.set(yscale="log", xlabel="Request rate (requests/s)", ylabel="Normalized latency (s/token)")
    axes.set_title(f"{panel.title}, simulated")
    plt.show()

# %% [markdown]
# **Figure 13.** The reason: more requests are batched together.

# %%
show("fig_batched_requests")

# %% [markdown]
# ## Sharing
#
# **Figure 14.** Samples of one prompt share its blocks, beams share more and for longer: the gain grows with their
# number.

# %%
show("fig_parallel_sampling")

# %%
show("fig_beam_search")

# %% [markdown]
# **Figure 15.** The memory that sharing saves.

# %%
show("fig_sharing")

# %% [markdown]
# **Figure 16.** A prefix that all requests share is kept, and computed, once.

# %%
show("fig_shared_prefix")

# %% [markdown]
# **Figure 17.** Conversations: long prompts, so systems that reserve run out even sooner.

# %%
show("fig_chatbot")

# %% [markdown]
# ## What blocks cost
#
# **Figure 18, right.** Small blocks are inefficient to read, large ones are left half empty; 16 is a good compromise.

# %%
show("fig_block_size")

# %% [markdown]
# **Figure 19.** A preempted request is swapped out and back, or computed again. Small blocks make swapping slow.

# %%
show("fig_swap_microbenchmark")

# %%
show("fig_swap_vs_recompute")

# %% [markdown]
# ## All claims at a glance
#
# Measured over claimed, one mark for each claim with a number; within a claimed range it stands at 1.
# `docs/fidelity.md` says which figures the cost model was fitted to, and which it predicts.

# %%
found = {name: folder for name in shown if (folder := find(name))}
claims = pd.concat(pd.read_csv(folder / "claims.csv").assign(experiment=name) for name, folder in found.items())
claimed = claims["measured"].clip(claims["paper_low"], claims["paper_high"].fillna(float("inf")))
claims["ratio"] = (claims["measured"] / claimed).where(claims["paper_high"] != 0)
LOOKS = {"reproduced": ("o", "#0072B2"), "not reproduced": ("X", "#D55E00"), "not comparable": ("s", style.GREY)}
with style.context():
    figure, axes = plt.subplots(figsize=(style.PAGE_IN, 0.25 * len(found) + 0.8), layout="constrained")
    for verdict, (marker, color) in LOOKS.items():
        rows = claims[claims["verdict"] == verdict].dropna(subset="ratio")
        places = rows["experiment"].map(list(found).index)
        axes.plot(rows["ratio"], places, marker, color=color, alpha=0.6, label=f"{verdict} ({len(rows)})")
    axes.axvline(1, color=style.INK, linewidth=0.6)
    axes.set_yticks(range(len(found)), [name.removeprefix("fig_").replace("_", " ") for name in found])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="Simulated / claimed by the paper")
    ticks = [0.5, 0.7, 1, 1.4, 2]
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=3)
    plt.show()

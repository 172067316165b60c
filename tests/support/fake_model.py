"""A model folder with a config and no weights, served by engine.fake.FakeRunner: whole clusters without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from engine.fake import FakeRunner
from engine.runner import Runner
from tandem.config import ClusterConfig
from tandem.layout import KVLayout
from tandem.model_files import ModelFiles
from worker.served_model import RunnerFactory, ServedModel

VOCAB_SIZE = 256
MAX_MODEL_LEN = 200_000
EOS_ID = 2


def fake_files(folder: Path) -> ModelFiles:
    """Write config.json; the rest is made up as it is needed."""
    config = {
        "architectures": ["FakeForCausalLM"],
        "max_position_embeddings": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": EOS_ID,
        "bos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelFiles("hf", folder, "fake")


def fake_runner_factory(
    step_s: float = 0.0, identity: str = "fake", wrap: Callable[[FakeRunner], Runner] = lambda runner: runner
) -> RunnerFactory:
    """Every step takes `step_s`. `wrap` may put something around the runner."""

    def load(config: ClusterConfig, files: ModelFiles) -> ServedModel:
        layout = KVLayout(
            num_layers=2, num_kv_heads=1, head_dim=4, block_size=config.engine.block_size, dtype="float32"
        )

        def make_runner(kv: memoryview, num_blocks: int) -> Runner:
            return wrap(FakeRunner(kv, num_blocks, layout, vocab_size=VOCAB_SIZE, delay_s=step_s))

        return ServedModel(layout, identity, VOCAB_SIZE, MAX_MODEL_LEN, make_runner)

    return load

"""GGUF files to weights: the same numbers as the checkpoint they were made of, and typed errors for what is wrong."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from engine.loader import load_model
from tandem.errors import ModelError
from tandem.model_files import ModelFiles
from tests.support.engine_runs import assert_equal_weights, assert_equals_oracle, generate, greedy
from tests.support.tiny_gguf import quantized, write_tiny_gguf
from tests.support.tiny_models import prompt_ids, write_tiny_model

READABLE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


@pytest.mark.parametrize("family", ["llama2", "llama3-plain", "smollm2", "qwen2", "qwen3", "mistral"])
def test_a_gguf_holds_the_same_model_as_the_checkpoint_it_was_made_of(tmp_path: Path, family: str) -> None:
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} if family == "llama3-plain" else {}
    model = write_tiny_model(tmp_path / "hf", family.removesuffix("-plain"), **changes)
    files = write_tiny_gguf(tmp_path / "model.gguf", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as torch's about read-only arrays
        ours = load_model(files, "float32")
    theirs = load_model(model.files, "float32")
    assert_equal_weights(ours, theirs)
    assert ours.spec.rope == theirs.spec.rope
    assert_equals_oracle(ours, model, [prompt_ids(n) for n in (1, 20)], 4)


@pytest.mark.parametrize("kind", READABLE)
@pytest.mark.parametrize("family", ["llama2", "qwen2"])
def test_a_quantized_gguf_equals_the_checkpoint_quantized_the_same_way(tmp_path: Path, family: str, kind: str) -> None:
    model = write_tiny_model(tmp_path / "hf", family)
    quantization = GGMLQuantizationType[kind]
    files = write_tiny_gguf(tmp_path / "model.gguf", model, quantization)
    with torch.no_grad():
        for parameter in model.oracle.parameters():
            parameter.copy_(torch.from_numpy(quantized(parameter.numpy(), quantization)))
    model.oracle.save_pretrained(tmp_path / "hf")
    ours = load_model(files, "float32")
    assert_equal_weights(ours, load_model(model.files, "float32"))
    assert_equals_oracle(ours, model, [prompt_ids(20)], 4)


def test_weights_of_a_gguf_do_not_change_with_the_file(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "hf", "llama2")
    files = write_tiny_gguf(tmp_path / "model.gguf", model)
    ours = load_model(files, "float32")
    before = ours.weights.norm.clone(), ours.weights.embedding.clone()
    with files.path.open("r+b") as file:
        file.write(b"\xff" * files.path.stat().st_size)
    assert torch.equal(ours.weights.norm, before[0])
    assert torch.equal(ours.weights.embedding, before[1])


def test_rope_factors_of_a_gguf_stand_for_the_llama3_scaling(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "hf", "llama3")
    rotary = model.oracle.model.rotary_emb
    head_dim = 16
    plain = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    factors = (plain / rotary.inv_freq).numpy()
    assert factors.max() > 7.9
    assert factors.min() == 1.0
    files = write_tiny_gguf(tmp_path / "model.gguf", model, extra={"rope_freqs.weight": factors})
    assert_equals_oracle(load_model(files, "float32"), model, [prompt_ids(n) for n in (5, 90)], 6)

    without = load_model(write_tiny_gguf(tmp_path / "without.gguf", model), "float32")
    with pytest.raises(AssertionError):
        assert_equals_oracle(without, model, [prompt_ids(90)], 6)


def test_unpermuted_rows_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "hf", "llama2")
    files = write_tiny_gguf(tmp_path / "model.gguf", model)
    monkeypatch.setattr("engine.weights.gguf.unpermute", lambda values, num_heads: values)
    with pytest.raises(AssertionError):
        assert_equals_oracle(load_model(files, "float32"), model, [prompt_ids(20)], 4)


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "TQ1_0"])
def test_a_quantization_that_is_not_read_is_named(tmp_path: Path, kind: str) -> None:
    model = write_tiny_model(tmp_path / "hf", "llama2", hidden_size=256, intermediate_size=256)
    files = write_tiny_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType[kind])
    with pytest.raises(ModelError, match=rf"token_embd\.weight is {kind}; these are read: F32, F16, BF16, Q8_0"):
        load_model(files, "float32")


def patched(files: ModelFiles, old: bytes, new: bytes) -> None:
    data = files.path.read_bytes()
    assert data.count(old) == 1
    files.path.write_bytes(data.replace(old, new))


def test_a_type_that_nobody_knows_is_numbered(tmp_path: Path) -> None:
    files = write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "hf", "llama2"))
    entry = b"output_norm.weight" + struct.pack("<IQ", 1, 64)
    patched(files, entry + struct.pack("<I", 0), entry + struct.pack("<I", 4999))
    with pytest.raises(ModelError, match=r"output_norm\.weight is type 4999"):
        load_model(files, "float32")


def test_a_tensor_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "hf", "llama2")
    lacking = write_tiny_gguf(tmp_path / "a.gguf", model, leave_out=("model.layers.1.mlp.up_proj.weight",))
    with pytest.raises(ModelError, match=r"a\.gguf.*layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(lacking, "float32")
    extra = {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}
    with pytest.raises(ModelError, match=r"b\.gguf: 1 tensors are not part of.*blk\.0\.ffn_gate_exps"):
        load_model(write_tiny_gguf(tmp_path / "b.gguf", model, extra=extra), "float32")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, r"llama\.expert_count = 8 is not implemented"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope_type 'yarn' is not implemented"),
        ({"rope.scaling.factor": 4.0}, "rope_type 'linear' is not implemented"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count = 8 is not implemented"),
        ({"rope.scale_linear": 2.0}, r"llama\.rope\.scale_linear = 2\.0 is not implemented"),
        ({"attention.value_length": 8}, r"llama\.attention\.value_length = 8 is not implemented"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale = 0\.5 is not implemented"),
        ({"attention.sliding_window": 64}, "sliding_window = 64"),
    ],
)
def test_gguf_metadata_that_changes_the_mathematics_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, object], message: str
) -> None:
    model = write_tiny_model(tmp_path / "hf", "llama2")
    with pytest.raises(ModelError, match=message):
        load_model(write_tiny_gguf(tmp_path / "model.gguf", model, metadata=metadata), "float32")


@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "block_count", "context_length"])
def test_a_metadata_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    files = write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "hf", "llama2"))
    patched(files, f"llama.{key}".encode(), f"other.{key}"[: len(f"llama.{key}")].encode())
    with pytest.raises(ModelError, match=rf"model\.gguf: metadata key llama\.{key} is missing"):
        load_model(files, "float32")


def test_another_gguf_architecture_is_named(tmp_path: Path) -> None:
    files = write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "hf", "llama2"))
    key = b"general.architecture" + struct.pack("<IQ", 8, 5)
    patched(files, key + b"llama", key + b"gemma")
    with pytest.raises(ModelError, match=r"GGUF architecture 'gemma' is not implemented; these are: llama, qwen2"):
        load_model(files, "float32")


def test_heads_that_differ_from_layer_to_layer_are_refused(tmp_path: Path) -> None:
    files = write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "hf", "llama2"))
    key = b"llama.attention.head_count"
    old = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, 4)
    patched(files, old, struct.pack("<Q", len(key)) + key + struct.pack("<IIQII", 9, 4, 2, 4, 2))
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count = \[4, 2\] is not implemented"):
        load_model(files, "float32")


def test_a_gguf_cut_short_anywhere_is_refused_and_never_crashes(tmp_path: Path) -> None:
    files = write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "hf", "llama2"))
    whole = files.path.read_bytes()
    for length in [*range(0, 3000, 97), *range(3000, len(whole), 23_000), len(whole) - 1]:
        files.path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.gguf"):
            load_model(files, "float32")


@pytest.mark.parametrize("seed", range(60))
def test_a_gguf_with_damaged_bytes_in_its_head_is_refused_or_read_but_never_crashes(
    tmp_path: Path, tiny_gguf_bytes: bytes, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    data = bytearray(tiny_gguf_bytes)
    for _ in range(3):
        data[int(chance.integers(4, 2500))] = int(chance.integers(0, 256))
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    try:
        model = load_model(ModelFiles("gguf", path, "damaged"), "float32")
    except ModelError as exc:
        assert "model.gguf" in str(exc) or "config key" in str(exc) or "head_dim" in str(exc) or "num_" in str(exc)
    else:
        assert model.spec.num_layers == 2


@pytest.fixture(scope="module")
def tiny_gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("damaged")
    return write_tiny_gguf(folder / "model.gguf", write_tiny_model(folder / "hf", "llama2")).path.read_bytes()


def test_a_bfloat16_model_loads_from_a_gguf(tmp_path: Path) -> None:
    files = write_tiny_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "hf", "qwen3"))
    model = load_model(files, "bfloat16")
    [answer] = generate(model, [prompt_ids(5)], [greedy(3)]).answers
    assert len(answer) == 3

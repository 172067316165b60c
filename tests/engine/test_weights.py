"""Safetensors files to weights, and typed errors for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loader import fingerprint, load_model
from tandem.errors import ModelError
from tests.support.engine_runs import assert_equal_weights, assert_equals_oracle
from tests.support.tiny_models import TinyModel, edit_config, prompt_ids, write_tiny_model

Tiny = Callable[[str], TinyModel]


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole", "llama2")
    shards = write_tiny_model(tmp_path / "shards", "llama2", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    ours, theirs = load_model(shards.files, "float32"), load_model(whole.files, "float32")
    assert_equal_weights(ours, theirs)
    assert_equals_oracle(ours, whole, [prompt_ids(9)], 4)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama2", max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=rf"{lost.name}: named by model.safetensors.index.json, but missing"):
        load_model(model.files, "float32")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', "{not json"])
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    model = write_tiny_model(tmp_path, "llama2")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        load_model(model.files, "float32")


def test_an_index_reaches_no_file_outside_its_folder(tmp_path: Path) -> None:
    outside = write_tiny_model(tmp_path / "outside", "llama2")
    inside = write_tiny_model(tmp_path / "inside", "llama2")
    (inside.files.path / "model.safetensors").unlink()
    names = load_file(outside.files.path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside/model.safetensors")}
    (inside.files.path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="missing"):
        load_model(inside.files, "float32")


def test_other_weights_beside_model_safetensors_are_left_alone(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "mistral")
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert load_model(model.files, "float32").spec.num_layers == 2


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3", lambda t: t.pop("model.layers.1.self_attn.k_norm.weight"), r"layers\.1\.self_attn\.k_norm.*missing"),
        ("qwen2", lambda t: t.pop("model.layers.0.self_attn.v_proj.bias"), r"v_proj\.bias is missing"),
        ("llama2", lambda t: t.pop("lm_head.weight"), r"lm_head\.weight is missing and tie_word_embeddings is false"),
        (
            "llama2",
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
            r"1 tensors are not part of LlamaForCausalLM.*q_proj\.bias",
        ),
        (
            "llama2",
            lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
            r"model\.norm\.weight has shape \(65,\), the config says \(64,\)",
        ),
        (
            "llama2",
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            r"torch\.int8: quantized checkpoints are not implemented",
        ),
        (
            "llama2",
            lambda t: t.update({"model.norm.weight": torch.zeros(64).to(torch.float8_e4m3fn)}),
            r"float8_e4m3fn: quantized checkpoints are not implemented",
        ),
    ],
)
def test_tensors_that_are_missing_unknown_or_wrong_are_named(
    tmp_path: Path, family: str, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    model = write_tiny_model(tmp_path, family)
    change_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_model(model.files, "float32")


def test_a_config_with_other_sizes_than_the_weights_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama3")
    edit_config(tmp_path, num_key_value_heads=4)
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape \(32, 64\), the config says \(64, 64\)"):
        load_model(model.files, "float32")


def test_layers_that_the_config_does_not_count_are_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama3")
    edit_config(tmp_path, num_hidden_layers=1, layer_types=None)
    with pytest.raises(ModelError, match=r"tensors are not part of .*layers\.1"):
        load_model(model.files, "float32")


def test_old_buffers_and_a_second_copy_of_a_tied_head_are_no_error(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama3")
    usual = load_model(model.files, "float32")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(tmp_path, add)
    assert_equal_weights(load_model(model.files, "float32"), usual)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_never_loaded(tmp_path: Path, name: str) -> None:
    model = write_tiny_model(tmp_path, "llama2")
    (tmp_path / "model.safetensors").unlink()
    # a pickle that would raise if anyone unpickled it
    (tmp_path / name).write_bytes(b"cbuiltins\nexec\n(S'raise SystemExit'\ntR.")
    with pytest.raises(ModelError, match=rf"no \*\.safetensors; {name} is a pickle, which is never loaded"):
        load_model(model.files, "float32")


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "llama2")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors$"):
        load_model(model.files, "float32")


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_safetensors_file_cut_short_is_named(tmp_path: Path, keep: int) -> None:
    model = write_tiny_model(tmp_path, "llama2")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: not a readable safetensors file"):
        load_model(model.files, "float32")


def test_the_identity_follows_the_bytes_and_not_the_place(tmp_path: Path) -> None:
    one = write_tiny_model(tmp_path / "a", "llama2")
    same = write_tiny_model(tmp_path / "b", "llama2")
    other = write_tiny_model(tmp_path / "c", "llama2", seed=1)
    identities = [load_model(m.files, "float32").identity for m in (one, same, other)]
    assert identities[0] == identities[1] != identities[2]
    path = tmp_path / "a" / "model.safetensors"
    before = fingerprint([path])
    path.write_bytes(path.read_bytes() + b" ")
    assert fingerprint([path]) != before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_and_layout_have_the_dtype_that_was_asked_for(tiny: Tiny, dtype: str) -> None:
    model = load_model(tiny("qwen3").files, dtype)
    assert str(model.weights.layers[1].qkv.dtype) == f"torch.{dtype}"
    layout = model.kv_layout(16)
    assert layout.block_shape == (2, 2, 2, 16, 32)
    assert layout.dtype == model.dtype == dtype
    assert load_model(tiny("qwen3").files, "auto").dtype == "float32"

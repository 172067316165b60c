"""What an operator may call a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem import pull
from tandem.errors import ModelError
from tandem.model_files import ModelFiles, resolve_model


def test_a_folder_with_config_json_is_a_hugging_face_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 3}')
    files = resolve_model(str(folder))
    assert files == ModelFiles("hf", folder, "my-model")
    assert files.config() == {"vocab_size": 3}


def test_a_gguf_file_and_a_folder_with_one_are_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    expected = ModelFiles("gguf", tmp_path / "tiny.gguf", "tiny")
    assert resolve_model(str(tmp_path / "tiny.gguf")) == expected
    assert resolve_model(str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "no config.json"), (["a.gguf", "b.gguf"], "2 .gguf files"), (["a.bin"], "no config.json")],
)
def test_a_folder_that_is_no_model_says_what_it_lacks(tmp_path: Path, names: list[str], message: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match="must be GGUF"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("model", ["./nowhere", "../up/model", "/no/such/model", "~/none/at/all", "gone.gguf"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(model: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(model)


@pytest.mark.parametrize("model", ["", "smollm3", "a/b/c", "owner/../name", "owner/.hidden"])
def test_a_name_that_means_nothing_gets_the_choices_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"hub id \(owner/name\) or smollm2-135m"):
        resolve_model(model)


def test_a_known_name_is_fetched_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    def fetch_known(name: str, *, progress: pull.Progress | None) -> Path:
        calls.append((name, progress))
        return tmp_path / "small.gguf"

    monkeypatch.setattr(pull, "fetch_known", fetch_known)
    monkeypatch.chdir(tmp_path)

    def progress(name: str, done: int, total: int | None) -> None:
        raise AssertionError("not called by the fake")

    assert resolve_model("smollm2-135m", progress=progress) == ModelFiles(
        "gguf", tmp_path / "small.gguf", "smollm2-135m"
    )
    assert calls == [("smollm2-135m", progress)]


def test_generation_config_fills_in_what_config_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "bos_token_id": 1, "top_k": 9}))
    config = ModelFiles("hf", tmp_path, "m").config()
    assert config == {"eos_token_id": [5, 6, 7], "bos_token_id": 1}


@pytest.mark.parametrize("text", ["", "[1]", "{", "\udcff"])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelFiles("hf", tmp_path, "m").config()

"""From what an operator calls a model to files on this machine. Neighbours: pull, model_info, the engine's loader."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem import pull
from tandem.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: a Hugging Face folder (`hf`) or one GGUF file (`gguf`). `name` is what clients call it."""

    kind: Literal["hf", "gguf"]
    path: Path
    name: str

    def config(self) -> dict[str, Any]:
        """Return the model's config in Hugging Face terms; generation_config.json's EOS ids are merged in.

        Raises ModelError naming the file that is missing or damaged.
        """
        if self.kind == "gguf":
            from tandem.gguf_config import read_gguf_config

            return read_gguf_config(self.path)
        config = read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        if generation.is_file():
            more = read_json(generation)
            eos_ids = [*_as_ids(config.get("eos_token_id")), *_as_ids(more.get("eos_token_id"))]
            config["eos_token_id"] = list(dict.fromkeys(eos_ids)) or None
            if config.get("bos_token_id") is None:
                config["bos_token_id"] = more.get("bos_token_id")
        return config


def resolve_model(model: str, *, progress: pull.Progress | None = None) -> ModelFiles:
    """Find or fetch `model`: a folder, a .gguf file, a name that `pull` knows, or a hub id (`owner/name`).

    Raises ModelError that says what was looked for and what to do.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return _from_path(path)
    if model in pull.KNOWN_MODELS:
        return ModelFiles("gguf", pull.fetch_known(model, progress=progress), model)
    if model.endswith(".gguf") or model.startswith((".", "/", "~")):
        raise ModelError(f"{model}: no such file or folder")
    if _HUB_ID.fullmatch(model):
        return ModelFiles("hf", pull.fetch_hub(model, progress=progress), model.rpartition("/")[2])
    known = ", ".join(sorted(pull.KNOWN_MODELS))
    raise ModelError(
        f"{model!r} is no model: give a folder with config.json, a .gguf file, a hub id (owner/name) or {known}"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ModelError(f"{path}: not valid JSON ({exc})") from exc
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _from_path(path: Path) -> ModelFiles:
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: a model file must be GGUF (*.gguf)")
        return ModelFiles("gguf", path, path.stem)
    if (path / "config.json").is_file():
        return ModelFiles("hf", path, path.name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles("gguf", ggufs[0], ggufs[0].stem)
    found = f"{len(ggufs)} .gguf files in it; name one" if ggufs else "no config.json and no .gguf file in it"
    raise ModelError(f"{path}: {found}")


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]

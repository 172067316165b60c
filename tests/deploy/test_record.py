import json
import os
import stat

import pytest

from deploy import record
from deploy.record import JoinedRay
from tandem.errors import ConfigError


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_STATE", str(tmp_path / "state"))


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_record_and_its_secrets_are_readable_by_their_owner_alone(tmp_path):
    made = record.create("a", str(tmp_path))
    for path in (made.path, made.secret_path, made.ray_token_file):
        assert mode(path) == 0o600
    assert mode(made.path.parent) == 0o700
    assert len(made.secret()) == 64
    assert made.secret() not in made.path.read_text()


def test_a_record_is_loaded_as_it_was_written(tmp_path):
    made = record.create("a", str(tmp_path)).updated(head_pid=12, grpc_address="127.0.0.1:1")
    assert record.load("a") == made
    assert record.names() == ["a"]
    assert mode(made.path) == 0o600


def test_a_name_is_taken_once(tmp_path):
    first = record.create("a", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'a' is running already.*tandem down"):
        record.create("a", str(tmp_path))
    assert record.load("a") == first


def test_removing_a_record_leaves_nothing_and_can_be_repeated(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir()
    made = record.create("a", str(folder))
    made.remove()
    made.remove()
    assert not folder.exists()
    assert list(made.path.parent.iterdir()) == []
    assert record.load("a") is None


def test_somebody_elses_ray_token_is_not_removed(tmp_path):
    token = tmp_path / "token"
    token.write_text("t")
    made = record.create("a", "", JoinedRay("127.0.0.1:1", str(token)))
    assert not made.owns_ray
    made.remove()
    assert token.exists()


def test_a_damaged_record_is_named(tmp_path):
    made = record.create("a", str(tmp_path))
    made.path.write_text(json.dumps({"name": "a"}))
    with pytest.raises(ConfigError, match="not a cluster record"):
        record.load("a")


def test_the_starter_is_known_by_its_start_time_so_that_a_recycled_pid_does_not_count(tmp_path):
    made = record.create("a", str(tmp_path))
    assert made.starter_lives()
    assert not made.updated(starter_start_s=made.starter_start_s - 1).starter_lives()

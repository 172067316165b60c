from pathlib import Path

import pytest
import yaml

from tandem.config import ClusterConfig, load_config
from tandem.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "deploy/configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path):
    assert load_config(path, {})


def test_the_embedded_configuration_is_the_default_one_with_every_setting():
    path = CONFIGS / "embedded.yaml"
    assert load_config(path, {}) == ClusterConfig()
    assert yaml.safe_load(path.read_text()) == ClusterConfig().model_dump(mode="json")


def test_what_the_configurations_set_is_what_they_are_called():
    assert load_config(CONFIGS / "aggregated.yaml", {}).pools.prefill == 0
    assert load_config(CONFIGS / "tcp.yaml", {}).transfer.transport == "tcp"
    assert set(yaml.safe_load((CONFIGS / "tcp.yaml").read_text())) == {"transfer"}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("engine.blok_size", r"engine\.blok_size: there is no such setting; did you mean engine\.block_size\?"),
        ("rooter.host", r"rooter: there is no such setting; did you mean router\?"),
        ("zzz", r"zzz: there is no such setting$"),
    ],
)
def test_an_unknown_setting_is_named_with_the_one_that_was_meant(key, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, {key: 1})


def test_a_missing_file_of_settings_is_said_once(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file or directory$"):
        load_config(tmp_path / "none.yaml", {})

from pathlib import Path

import pytest
import yaml

from tandem.config import ClusterConfig, load_config

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

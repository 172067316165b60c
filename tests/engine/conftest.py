from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.tiny_models import TinyModel, tiny_model_factory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return tiny_model_factory(tmp_path_factory.mktemp("tiny"))

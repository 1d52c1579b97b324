import inspect

import pytest

import flows.params
import twinkle_core.config
from twinkle_core.config import Config, field_mark

CONFIGS = sorted(
    {
        item
        for module in (twinkle_core.config, flows.params)
        for item in vars(module).values()
        if inspect.isclass(item) and issubclass(item, Config) and item is not Config
    },
    key=lambda config: config.__name__,
)
FIELDS = [(config, name) for config in CONFIGS for name in config.model_fields]


def test_all_configs_are_looked_at() -> None:
    assert {"SFTParams", "TrainConfig", "ResourcesConfig", "SourceConfig"} <= {config.__name__ for config in CONFIGS}
    assert len(FIELDS) > 50


@pytest.mark.parametrize(("config", "name"), FIELDS, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_each_field_is_marked_and_explained(config: type[Config], name: str) -> None:
    assert field_mark(config, name) in ("recipe", "resource")
    assert config.model_fields[name].description


def test_a_forgotten_mark_is_noticed() -> None:
    class Forgetful(Config):
        size: int = 1

    with pytest.raises(TypeError, match="Forgetful.size is marked neither"):
        field_mark(Forgetful, "size")

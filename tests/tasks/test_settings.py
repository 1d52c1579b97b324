from pathlib import Path

import pytest

from storage.errors import StorageError
from tasks.settings import QUIET, Settings, child_environment


def test_defaults_lie_in_the_home_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = Settings.from_env({})
    assert settings.home == tmp_path / ".twinkle"
    assert settings.store_url == f"file://{tmp_path}/.twinkle/store"
    assert settings.cache_dir == tmp_path / ".twinkle" / "cache"
    assert (settings.prefect_api_url, settings.mlflow_uri, settings.trusted_code) == (None, None, None)


def test_relative_places_are_fixed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_env({"TWINKLE_HOME": "here", "TWINKLE_STORE": "store"})
    assert (settings.home, settings.store_url) == (tmp_path / "here", f"file://{tmp_path}/store")
    with pytest.raises(StorageError, match="unknown scheme 'ftp'"):
        Settings.from_env({"TWINKLE_STORE": "ftp://x"})


def test_another_process_gets_the_same_settings_and_no_telemetry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in QUIET:
        monkeypatch.delenv(name)
    settings = Settings.from_env(
        {
            "TWINKLE_HOME": str(tmp_path),
            "TWINKLE_STORE": "s3://bucket/a",
            "TWINKLE_TRUSTED_CODE": str(tmp_path / "code"),
            "PREFECT_API_URL": "http://p/api",
            "MLFLOW_TRACKING_URI": "http://m",
        }
    )
    child = child_environment(settings, {"EXTRA": "1"})
    assert Settings.from_env(child) == settings
    assert settings.trusted_code == tmp_path / "code"
    assert child["EXTRA"] == "1"
    assert child.items() >= QUIET.items()


def test_a_prefect_profile_of_the_user_is_left_to_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings.from_env({"TWINKLE_HOME": str(tmp_path)})
    monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert child_environment(settings)["PREFECT_HOME"] == str(tmp_path / "prefect")
    monkeypatch.setenv("PREFECT_API_URL", "http://theirs/api")
    assert "PREFECT_HOME" not in child_environment(settings)

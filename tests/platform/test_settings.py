"""Settings: options before variables before defaults, and nothing unknown or wrong gets by."""

from pathlib import Path

import pytest

from polyloom.platform.settings import GIB, SettingsError, load_settings


def test_options_win_over_variables_over_defaults() -> None:
    environ = {"POLYLOOM_PORT": "9000", "POLYLOOM_HOST": "0.0.0.0", "HOME": "/root"}
    settings = load_settings({"base": "b", "port": 9001, "dtype": None}, environ)
    assert (settings.port, settings.host, settings.dtype) == (9001, "0.0.0.0", "auto")


def test_sizes_and_folders_are_read_as_people_write_them() -> None:
    environ = {
        "POLYLOOM_BASE": "b",
        "POLYLOOM_KV_MEMORY": "1.5GiB",
        "POLYLOOM_UPLOAD_LIMIT": "1000",
        "POLYLOOM_ADAPTER_MEMORY": "512 mb",
        "POLYLOOM_DATA_DIR": "/data",
    }
    settings = load_settings({}, environ)
    assert settings.kv_memory == GIB * 3 // 2
    assert (settings.upload_limit, settings.adapter_memory) == (1000, 512 << 20)
    assert settings.data_dir == Path("/data")


@pytest.mark.parametrize(("text", "policy"), [("off", "off"), ("latency", "latency"), ("4", 4)])
def test_drafts_are_a_profile_or_a_length(text: str, policy: str | int) -> None:
    assert load_settings({"base": "b"}, {"POLYLOOM_DRAFTS": text}).drafts == policy


def test_an_empty_variable_is_not_set() -> None:
    assert load_settings({"base": "b"}, {"POLYLOOM_ADMIN_KEY": ""}).admin_key is None


def test_the_client_s_variables_are_left_alone() -> None:
    load_settings({"base": "b"}, {"POLYLOOM_URL": "http://x", "POLYLOOM_API_KEY": "k"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("POLYLOOM_TYPO", "1"),
        ("POLYLOOM_PORT", "x"),
        ("POLYLOOM_PORT", "70000"),
        ("POLYLOOM_DEVICE", "tpu"),
        ("POLYLOOM_KV_MEMORY", "lots"),
        ("POLYLOOM_QUEUE_LIMIT", "0"),
        ("POLYLOOM_REQUEST_DEADLINE", "-1"),
        ("POLYLOOM_ITL_TARGET", "0"),
        ("POLYLOOM_ITL_TARGET", "inf"),
        ("POLYLOOM_ADMIN_KEY", "short"),
        ("POLYLOOM_DRAFTS", "sometimes"),
        ("POLYLOOM_DRAFTS", "32"),
    ],
)
def test_a_wrong_setting_stops_the_start_by_name(variable: str, value: str) -> None:
    with pytest.raises(SettingsError) as stopped:
        load_settings({"base": "b"}, {variable: value})
    assert variable.removeprefix("POLYLOOM_").lower() in str(stopped.value).lower()


def test_a_base_is_needed() -> None:
    with pytest.raises(SettingsError, match="--base"):
        load_settings({}, {})

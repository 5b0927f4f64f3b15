"""Settings: what the environment and the config file say, and what is told where they are wrong."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.errors import BadFile, UserError
from fastlaunch.job import DEFAULT_REGION
from fastlaunch.settings import Settings, load_settings


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config file that FASTLAUNCH_CONFIG names; not there yet."""
    path = tmp_path / "config.yaml"
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(path))
    return path


def test_an_empty_config_file_gives_the_defaults(isolated: Path, config: Path) -> None:
    for text in ("", "\n", "# nothing\n", "{}"):
        config.write_text(text)
        assert load_settings() == Settings(home=isolated, prices=None, region=DEFAULT_REGION)


def test_the_platforms_folders_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLAUNCH_HOME", "")
    monkeypatch.delenv("FASTLAUNCH_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    settings = load_settings()
    assert settings == Settings(home=settings.home)
    assert settings.home.is_relative_to(tmp_path)
    assert "fastlaunch" in settings.home.name


def test_loading_creates_nothing(isolated: Path) -> None:
    assert not load_settings().home.exists()


def test_prices_are_found_beside_the_config_file(config: Path) -> None:
    config.write_text("prices: own/prices.yaml\nregion: eu-west-1\n")
    settings = load_settings()
    assert settings.prices == config.parent / "own" / "prices.yaml"
    assert settings.region == "eu-west-1"


def test_an_absolute_path_and_a_home_folder_stay_what_they_are(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("FASTLAUNCH_HOME", "~/runs")
    config.write_text("prices: ~/prices.yaml\n")
    assert load_settings().prices == tmp_path / "me" / "prices.yaml"
    assert load_settings().home == tmp_path / "me" / "runs"
    config.write_text("prices: /srv/prices.yaml\n")
    assert load_settings().prices == Path("/srv/prices.yaml")


def test_a_config_file_that_is_named_must_exist(config: Path) -> None:
    with pytest.raises(BadFile, match="does not exist") as caught:
        load_settings()
    assert caught.value.hint == "FASTLAUNCH_CONFIG names it"


def test_an_unknown_user_is_the_users_error(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.touch()
    monkeypatch.setenv("FASTLAUNCH_HOME", "~no-such-user/runs")
    with pytest.raises(UserError, match="names no folder"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        ("region: [", "is not YAML", 1),
        ("region: a\nregion: b: c\n", "is not YAML", 2),
        ("region: 2001-99-99", "is not YAML", None),
        ("region: !!timestamp x", "is not YAML", None),
        ("region: !!python/object:os.system x", "is not YAML", 1),
        ("[" * 5000, "is not YAML", None),
        ("region: \x00", "is not YAML", None),
        ("reigon: us-east-1", "holds something else", None),
        ("- region", "holds something else", None),
        ("[]", "holds something else", None),
        ("0", "holds something else", None),
        ("text", "holds something else", None),
        ("region: 1", "are text", None),
        ("region: ", "are text", None),
        ("prices: ''", "are text", None),
        ("prices: [a.yaml]", "are text", None),
    ],
)
def test_a_wrong_config_file_is_named(config: Path, text: str, problem: str, line: int | None) -> None:
    config.write_text(text)
    with pytest.raises(BadFile, match=problem) as caught:
        load_settings()
    assert str(config) in caught.value.message
    assert caught.value.line == line


def test_an_unreadable_config_file_is_named(config: Path) -> None:
    config.mkdir()
    with pytest.raises(BadFile, match="cannot be read: Is a directory"):
        load_settings()


@given(
    data=st.binary(max_size=60) | st.text("regionpc: -[]{}!&*|>'\"#%@\n\t0aé", max_size=40).map(str.encode)
)
def test_any_config_file_is_settings_or_a_bad_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-config.yaml"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTLAUNCH_CONFIG", str(path))
        try:
            settings = load_settings()
        except BadFile as error:
            assert error.path == path
        else:
            assert settings.region

"""For every test: a home, a config file and an environment of its own, and hypothesis without a clock."""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

#: `aws_server` and what goes with it: tests/aws/aws_fixtures.py.
pytest_plugins = ("aws_fixtures",)

# Shared machines make deadlines flaky, and a failure must come back when the suite is run again.
settings.register_profile("fastlaunch", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fastlaunch"))


def pytest_configure(config: pytest.Config) -> None:
    # What hypothesis keeps belongs with pytest's own cache, not at the top of a clone that stays clean.
    set_hypothesis_home_dir(config.rootpath / ".pytest_cache" / "hypothesis")


@pytest.fixture(autouse=True)
def isolated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own FASTLAUNCH_HOME, empty; its config file is empty too, and AWS is out of reach.

    Subprocesses inherit it.
    """
    for name in [name for name in os.environ if name.startswith(("FASTLAUNCH_", "AWS_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("isolated")
    config = folder / "config.yaml"
    config.touch()
    monkeypatch.setenv("FASTLAUNCH_HOME", str(folder / "home"))
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(config))
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return folder / "home"

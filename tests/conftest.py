"""For every test: a home, a config file, an environment and processes of its own, and its tier.

Tiers: a test without a marker is fast. `cloud` is given to those that talk to the mock of AWS over HTTP;
`slow`, `full` and `gpu` are written at the tests. See docs/contributing.md.
"""

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from leftovers import MARK, kill_leftovers, num_started

# Before torch is imported: two workers of two threads each on two cores spend three times the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: `aws_server` and what goes with it: tests/aws/aws_fixtures.py.
pytest_plugins = ("aws_fixtures",)

# Shared machines make deadlines flaky, and a failure must come back when the suite is run again.
reproducible = {"deadline": None, "derandomize": True, "database": None, "print_blob": True}
settings.register_profile("fast", max_examples=15, **reproducible)  # type: ignore[arg-type]
settings.register_profile("full", max_examples=200, **reproducible)  # type: ignore[arg-type]
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


def pytest_configure(config: pytest.Config) -> None:
    # What hypothesis keeps belongs with pytest's own cache, not at the top of a clone that stays clean.
    set_hypothesis_home_dir(config.rootpath / ".pytest_cache" / "hypothesis")
    hear_signals()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        servers = {"shared_aws_server", "aws_server"} & set(getattr(item, "fixturenames", ()))
        if servers and not any(item.get_closest_marker(tier) for tier in ("slow", "full", "gpu")):
            item.add_marker("cloud")


def pytest_collection_finish() -> None:
    # What was imported stays, and is no longer looked at by each collection of garbage.
    gc.freeze()


def hear_signals() -> None:
    """Undo what `nohup`, and `&` in a script, ignore: tests raise these signals and send them to processes.

    What is ignored stays so in every process that is started; what has a handler is a new process's default.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # The session itself goes on as nohup wants it.
        signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a new folder at each `next`. For a number of its own pytest would look at all that there are."""
    root = tmp_path_factory.mktemp("isolated")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def isolated(folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's own FASTLAUNCH_HOME, empty; its config file is empty too, and AWS is out of reach.

    Subprocesses inherit it, and none outlives the test.
    """
    for name in [name for name in os.environ if name.startswith(("FASTLAUNCH_", "AWS_"))]:
        monkeypatch.delenv(name)
    folder = next(folders)
    folder.mkdir()
    config = folder / "config.yaml"
    config.touch()
    monkeypatch.setenv("FASTLAUNCH_HOME", str(folder / "home"))
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(config))
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # With it, processes meet a closed pipe or a full disk earlier than a user's would.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    # Of a terminal, or of 80 columns that pytest's workers are told, tables would be as wide.
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv(MARK, str(folder))
    before = num_started()
    yield folder / "home"
    kill_leftovers(str(folder), look=num_started() > before)

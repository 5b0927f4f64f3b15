"""Where fastlaunch keeps its files, and what the user's config file says.

    FASTLAUNCH_HOME     ledger and runs; default: the platform's user data folder
    FASTLAUNCH_CONFIG   the config file; default: config.yaml in the platform's user config folder

The config file may hold `prices` (a price file of the user's own) and `region`.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from fastlaunch.errors import BadFile
from fastlaunch.job import DEFAULT_REGION


@dataclass(frozen=True, kw_only=True)
class Settings:
    """home: folder of ledger and runs. prices: the user's price file, merged over the shipped one."""

    home: Path
    prices: Path | None = None
    region: str = DEFAULT_REGION


def load_settings() -> Settings:
    """Settings from the environment and the config file. Raises BadFile for a config file that is wrong."""
    import platformdirs
    import yaml

    home = Path(os.environ.get("FASTLAUNCH_HOME") or platformdirs.user_data_path("fastlaunch")).expanduser()
    named = os.environ.get("FASTLAUNCH_CONFIG")
    path = Path(named).expanduser() if named else platformdirs.user_config_path("fastlaunch") / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        if named:
            raise BadFile(path, "does not exist", hint="FASTLAUNCH_CONFIG names it") from None
        config = {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadFile(path, f"cannot be read: {error}") from None
    if not isinstance(config, dict) or not config.keys() <= {"prices", "region"}:
        raise BadFile(path, "holds something else than `prices` and `region`")
    if not all(isinstance(value, str) and value for value in config.values()):
        raise BadFile(path, "`prices` and `region` are text")
    prices = config.get("prices")
    return Settings(
        home=home,
        prices=path.parent / Path(prices).expanduser() if prices else None,
        region=config.get("region", DEFAULT_REGION),
    )

"""Where fastlaunch keeps its files, and what the user's config file says.

    FASTLAUNCH_HOME     ledger and runs; default: the platform's user data folder
    FASTLAUNCH_CONFIG   the config file; default: config.yaml in the platform's user config folder

The config file may hold `prices` (a price file of the user's own) and `region`.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from fastlaunch.errors import BadFile, UserError
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

    home = _expand(os.environ.get("FASTLAUNCH_HOME") or str(platformdirs.user_data_path("fastlaunch")))
    named = os.environ.get("FASTLAUNCH_CONFIG")
    path = _expand(named) if named else platformdirs.user_config_path("fastlaunch") / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise BadFile(path, "does not exist", hint="FASTLAUNCH_CONFIG names it") from None
        config = {}
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise BadFile(path, f"is not YAML: {error.problem}", line=line) from None
    # The last three come through PyYAML for an impossible date, an empty tag or a thousand brackets.
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise BadFile(path, f"is not YAML: {error}") from None
    if config is None:
        config = {}
    if not isinstance(config, dict) or not config.keys() <= {"prices", "region"}:
        raise BadFile(path, "holds something else than `prices` and `region`")
    if not all(isinstance(value, str) and value for value in config.values()):
        raise BadFile(path, "`prices` and `region` are text")
    prices = config.get("prices")
    return Settings(
        home=home,
        prices=path.parent / _expand(prices) if prices else None,
        region=config.get("region", DEFAULT_REGION),
    )


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{text!r} names no folder", "there is no such user; write the path out") from None

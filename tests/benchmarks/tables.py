"""Write README.md's measured tables anew: what `fastlaunch compare` prints of the records, and nothing else.

    python tests/benchmarks/tables.py

Between `<!-- measured:NAME -->` and `<!-- /measured -->` stand, in a block of code, the commands that a
reader would type, `fastlaunch runs import` and last `fastlaunch compare`, and in a second block what that
printed. Each pair of markers has a ledger of its own, so that `compare` sees what was imported there. To show
another table, write the markers and the commands, and run this.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
_MEASURED = re.compile(
    r"(?P<marker><!-- measured:[\w-]+ -->\n)(?P<inside>.*?)<!-- /measured -->\n", re.DOTALL
)
_COMMANDS = re.compile(r"```console\n(?P<commands>.*?)```\n", re.DOTALL)
_ALLOWED = (["fastlaunch", "runs", "import"], ["fastlaunch", "compare"])


def main() -> None:
    text = README.read_text(encoding="utf-8")
    README.write_text(with_tables(text), encoding="utf-8")
    sys.stdout.write(f"{len(_MEASURED.findall(text))} tables in {README}\n")


def with_tables(text: str) -> str:
    """`text` with every table as its commands print it today."""
    return _MEASURED.sub(lambda match: match["marker"] + _section(match["inside"]), text)


def commands_of(text: str) -> list[list[list[str]]]:
    """The words of the commands of each table. Raises ValueError for others than imports and compare."""
    return [_commands(match["inside"])[1] for match in _MEASURED.finditer(text)]


def _commands(inside: str) -> tuple[str, list[list[str]]]:
    """The block with the commands, as it stands, and their words."""
    found = _COMMANDS.search(inside)
    lines = found["commands"].replace("\\\n", " ").splitlines() if found else []
    if found is None or not lines:
        raise ValueError(f"no commands in {inside[:200]!r}")
    commands = [shlex.split(line.removeprefix("$ ")) for line in lines]
    for command in commands:
        if not any(command[: len(words)] == words for words in _ALLOWED):
            raise ValueError(f"{shlex.join(command)}: only records are imported here, and compared")
    return found[0], commands


def _section(inside: str) -> str:
    shown, commands = _commands(inside)
    printed = ""
    with tempfile.TemporaryDirectory(prefix="fastlaunch-tables-") as home:
        for command in commands:
            printed = _run(command, home)
    return f"{shown}\n```text\n{printed.strip()}\n```\n<!-- /measured -->\n"


def _run(command: list[str], home: str) -> str:
    """What `command` prints on stdout, with a ledger in `home` and without the user's own settings."""
    config = Path(home, "config.yaml")
    config.touch()
    # COLUMNS would make the tables as wide as the terminal is.
    left_out = ("FASTLAUNCH_", "AWS_", "COLUMNS")
    others = {name: of for name, of in os.environ.items() if not name.startswith(left_out)}
    environment = {
        **others,
        "FASTLAUNCH_HOME": home,
        "FASTLAUNCH_CONFIG": str(config),
        "PYTHONPATH": os.pathsep.join(str(ROOT / half) for half in ("launcher", "train")),
    }
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} exited {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()

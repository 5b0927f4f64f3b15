"""Every command says what it does, and every command line in the README and in docs/ can be typed."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from fastlaunch.cli.main import COMMANDS, fastlaunch, run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT).with_suffix(""))
)
#: Commands that need neither a machine nor an account; so do dry runs.
OFFLINE = {"demo", "experiments", "iam", "prices", "recipes", "workloads"}
#: Options in the text that are not the launcher's.
OTHERS = {"--no-build-isolation", "--only", "--resume"}


def context_of(command: click.Command, name: str, parent: click.Context | None = None) -> click.Context:
    """A context in which `command` is described or parsed, but not run."""
    # click keeps a command's help option as the first context named it.
    settings = {**fastlaunch.context_settings, **command.context_settings}
    return click.Context(command, info_name=name, parent=parent, **settings)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and subcommand, by the words that call it."""
    waiting: list[tuple[str, click.Command]] = [("fastlaunch", fastlaunch)]
    while waiting:
        words, command = waiting.pop(0)
        yield words, command
        if isinstance(command, click.Group):
            with context_of(command, words) as context:
                for name in command.list_commands(context):
                    found = command.get_command(context, name)
                    assert found is not None
                    waiting.append((f"{words} {name}", found))


def test_every_command_and_option_says_what_it_does() -> None:
    silent = []
    for words, command in commands():
        if not command.help:
            silent.append(words)
        silent += [
            f"{words} {'/'.join(option.opts)}"
            for option in command.params
            if isinstance(option, click.Option) and not option.help
        ]
        with context_of(command, words) as context:
            assert words in command.get_help(context)
    assert silent == []


@pytest.mark.parametrize("path", [path for path, _ in commands()])
def test_help_ends_with_examples_that_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("instance: p5.48xlarge\n", encoding="utf-8")
    by_path = dict(commands())
    _, _, shown = (by_path[path].epilog or "").partition("Examples:\n")
    # They are indented by two more; a long one continues on the next line.
    assert all(len(line) <= 78 for line in shown.splitlines())
    lines = [line.strip() for line in shown.replace(" \\\n", " ").splitlines()]
    assert lines
    for what, line in zip(lines[::2], lines[1::2], strict=True):
        assert what.startswith("# ")
        assert line == path or line.startswith(f"{path} ") or isinstance(by_path[path], click.Group)
        called = max((name for name in by_path if f"{line} ".startswith(f"{name} ")), key=len)
        words = shlex.split(line)[len(called.split()) :]
        by_path[called].make_context(called, words, **fastlaunch.context_settings)


def command_lines(text: str) -> list[str]:
    """The `fastlaunch ...` command lines in the code blocks of a Markdown text, continued lines joined."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [
        match[1] for line in lines if (match := re.match(r"\s*(?:\$ )?(?:\S*/)?(fastlaunch(?: .*)?)$", line))
    ]


def words_of(line: str) -> list[str]:
    """The arguments of a command line, up to a pipe, a redirection or a command of the user's own."""
    words = shlex.split(line, comments=True)[1:]
    ends = [
        number for number, word in enumerate(words) if word in ("|", ">", ">>", "&&", ";", "2>", "&", "--")
    ]
    return words[: ends[0]] if ends else words


def check_line(line: str) -> None:
    """Raise click.UsageError unless `line` names a command, options that it has and values that they take."""
    words = words_of(line)
    command: click.Command = fastlaunch
    context = context_of(command, "fastlaunch")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name!r} in {line!r}")
        command, context = found, context_of(found, name, parent=context)
    values, rest, _ = command.make_parser(context).parse_args(words)
    if rest:
        raise click.UsageError(f"unexpected {rest} in {line!r}")
    for option in command.params:
        if isinstance(option.type, click.Choice) and option.name in values:
            option.type_cast_value(context, values[option.name])


@each_page
def test_a_pages_command_lines_can_be_typed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in command_lines(text):
        try:
            check_line(line)
        except click.UsageError as error:
            raise AssertionError(f"{line}\n{error.format_message()}") from error
    typed = " ".join(re.findall(r"^\$ make ([a-z -]+)", text, re.MULTILINE)).split()
    assert set(typed) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.slow
@each_page
def test_a_pages_offline_commands_and_dry_runs_succeed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLAUNCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("requirements.txt").write_text("pandas\n")
    Path("tune.txt").write_text("transformers\npeft\n")
    Path("train.jsonl").write_text('{"text": "abc"}\n' * 99)
    text = page.read_text(encoding="utf-8")
    for name, rest in re.findall(r"^```yaml\n# ([\w-]+\.yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        Path(name).write_text(rest)
    for line in command_lines(text):
        words = words_of(line)
        is_dry = words[:1] == ["submit"] and "--dry-run" in words
        # A line with a $ is filled in by the shell.
        is_offline = set(words[:1]) & OFFLINE and words[:2] != ["prices", "update"]
        if (is_dry or is_offline) and "$" not in line:
            assert run(shlex.split(line)[1:] if "--" in line.split() else words) == 0, line


@each_page
def test_the_options_and_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    options = {name for _, command in commands() for option in command.params for name in option.opts}
    assert set(re.findall(r"`(--[a-z][a-z-]*)", text)) <= options | OTHERS
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        # The site holds what is in docs/ and nothing else.
        assert page.name == "README.md" or linked.resolve().is_relative_to(ROOT / "docs"), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def test_the_tests_that_a_page_names_exist() -> None:
    named = [
        each
        for page in PAGES
        for each in re.findall(
            r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`", page.read_text(encoding="utf-8")
        )
    ]
    assert len(named) > 20
    for file, name, case in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"\ndef {name}(" in text and (not case or f'"{case}"' in text), f"{file}::{name}[{case}]"


def anchors(page: Path) -> set[str]:
    """The names under which the headings of a Markdown page can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_reference_names_every_command() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"| `fastlaunch {name}` |" not in text] == []


def test_a_wrong_command_line_is_found() -> None:
    assert command_lines("```sh\n$ fastlaunch runs\n```\nfastlaunch nothing\n") == ["fastlaunch runs"]
    for line in ("fastlaunch --nope", "fastlaunch sumbit --local"):
        with pytest.raises(click.UsageError):
            check_line(line)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loops_over_many_variants_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for page, name in (("train", "train.py"), ("judge", "judge.py"), ("judge", "judge.sh")):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        (code,) = re.findall(rf"^```\w+\n(# {name}\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
        Path(name).write_text(code)
    for loop, last in (("python judge.py", "64"), ("bash judge.sh", "micro=64 is not worse")):
        done = subprocess.run(loop.split(), stdout=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, [last])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebook_runs(isolated: Path) -> None:
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())
    scope: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), scope)
    assert [run.state for run in scope["submitted"].runs] == ["completed"] * 6
    assert scope["there"].ceiling.usd > 10

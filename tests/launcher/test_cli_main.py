"""The command line itself: exit codes, what --help imports, unknown commands, a reader that stops reading."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fastlaunch.cli.main import COMMANDS, LazyGroup, fastlaunch, run
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.jobs.options import options_of

#: Heavy, or of no use to someone who only asks for help.
NOT_FOR_HELP = {
    "torch",
    "boto3",
    "botocore",
    "numpy",
    "scipy",
    "yaml",
    "rich",
    "tabulate",
    "jinja2",
    "sqlite3",
}
#: Adds a command of this module, which it calls.
CALL = (
    "import sys; sys.path.append({folder!r}); import command; from fastlaunch.cli import main as cli;"
    " sys.modules['fastlaunch.cli.command'] = command; cli.COMMANDS['command'] = ('command', '');"
    " sys.argv[1:] = ['command']; cli.main()"
)


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (UserError("steps is 0", "give 1 or more"), 2, "error: steps is 0\n  give 1 or more\n"),
        (CloudRefused("no capacity"), 3, "error: no capacity\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.Abort(), 130, "interrupted\n"),
        # Anything else is a bug, with its traceback. click itself takes an EOFError for Ctrl-C.
        (EOFError("cut"), 70, "EOFError: cut\n"),
        (AssertionError("never"), 70, "Traceback"),
    ],
)
def test_an_error_is_printed_on_stderr_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    exit_code: int,
    text: str,
) -> None:
    @click.command()
    def command() -> None:
        raise error

    class Module:
        failing = command

    monkeypatch.setitem(COMMANDS, "failing", ("failing", "Fails."))
    monkeypatch.setitem(sys.modules, "fastlaunch.cli.failing", Module)
    assert run(["failing"]) == exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err if exit_code == 70 else text == err


def test_what_others_say_does_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    title = "\x1b]0;title\x07"

    @click.command()
    def command() -> None:
        print(f"printed {title}")
        click.echo(f"echoed {title}")
        click.echo(f"warning: {title}\udcff", err=True)
        click.echo(json.dumps({"reason": title}))
        raise UserError(title, f"hint\r{title}")

    class Module:
        says = command

    monkeypatch.setitem(COMMANDS, "says", ("says", "Says."))
    monkeypatch.setitem(sys.modules, "fastlaunch.cli.says", Module)
    streams = sys.stdout, sys.stderr
    assert run(["says"]) == 2
    assert (sys.stdout, sys.stderr) == streams
    out, err = capsys.readouterr()
    shown = "^[]0;title^G"
    *lines, data = out.splitlines()
    assert lines == [f"printed {shown}", f"echoed {shown}"]
    escaped = r"\x1b]0;title\x07"
    assert err.splitlines() == [f"warning: {shown}\\udcff", f"error: {escaped}", rf"  hint\r{escaped}"]
    # Programs get it as it is.
    assert json.loads(data) == {"reason": title}


def test_a_closed_stdout_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert run(["recipes"]) == 0
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        *(("launch", "submit"), ("down", "cancel"), ("stop", "cancel"), ("ls", "runs"), ("queue", "status")),
        ("collect", "status"),
    ],
)
def test_another_tools_word_leads_to_the_command(
    capsys: pytest.CaptureFixture[str], typed: str, command: str
) -> None:
    assert run([typed]) == 2
    assert f"did you mean {command}?" in capsys.readouterr().err


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef fastlaunch"), ("fish", "complete ")])
def test_the_shell_can_complete_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str, mark: str
) -> None:
    monkeypatch.setenv("_FASTLAUNCH_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit) as ended:
        run([])
    assert ended.value.code == 0
    assert mark in capsys.readouterr().out
    monkeypatch.setenv("_FASTLAUNCH_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "fastlaunch sub")
    monkeypatch.setenv("COMP_CWORD", "sub" if shell == "fish" else "1")
    with pytest.raises(SystemExit):
        run([])
    assert "submit" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_in_its_module(name: str) -> None:
    assert isinstance(fastlaunch, LazyGroup)
    with fastlaunch.make_context("fastlaunch", [name], resilient_parsing=True) as context:
        command = fastlaunch.get_command(context, name)
    assert command is not None and command.name == name
    assert command.help and command.get_short_help_str() == COMMANDS[name][1]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fastlaunch.cli.main import run; code = run(['--help']);"
        " print(*sorted({name.partition('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "click" in modules and not NOT_FOR_HELP & modules


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.slow
def test_output_to_a_full_disk_is_no_bug() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "fastlaunch", "recipes"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the output cannot be written: ")


@pytest.mark.slow
def test_unflushed_output_meets_the_closed_pipe_in_time(tmp_path: Path) -> None:
    # `print` leaves its text in the buffer, which would be flushed, and fail, after the exit code is decided.
    (tmp_path / "command.py").write_text(
        "import sys, click\n@click.command()\ndef command():\n    sys.stdout.write('a line\\n')\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    call = [sys.executable, "-c", CALL.format(folder=str(tmp_path))]
    done = subprocess.run(call, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(
        "import time, click\n@click.command()\ndef command():\n    click.echo('here')\n    time.sleep(60)\n"
    )
    call = [sys.executable, "-c", CALL.format(folder=str(tmp_path))]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("argv", "ours"),
    [
        ("submit --spot", "--purchase spot"),
        ("submit --nodes 2", "--num-nodes N"),
        ("init --budget 3", "--max-cost USD"),
        ("compare --json", "--output json"),
        # Slurm's.
        ("submit -N 2", "--num-nodes N"),
        ("submit --time 1:00:00", "--max-hours H"),
        ("submit --job-name x", "--tag NAME=VALUE"),
        ("submit --gpus-per-node 8", "--nproc 8' or '--instance TYPE"),
        ("submit --gres=gpu:8 --local", "--nproc 8"),
        ("submit --gres gpu:h100:8", "--instance p5.48xlarge"),
        # torchrun's.
        ("submit --nnodes 2", "--num-nodes N"),
        ("submit --nproc-per-node 8", "--nproc N"),
        # SkyPilot's and others'.
        ("submit --cloud aws", "--instance TYPE"),
        ("submit --use-spot", "--purchase spot"),
        ("submit --accelerators H100:8", "--instance p5.48xlarge"),
        ("sweep --gpu A100", "--instance p4d.24xlarge' or '--instance p4de.24xlarge"),
        ("submit --gpus 8", "--nproc 8' or '--instance TYPE"),
        ("submit --local --gpus 8", "--nproc 8"),
        ("submit --gpus", "--instance TYPE"),
        ("prices --gpus H200", "--gpu h200' or '--instance p5e.48xlarge' or '--instance p5en.48xlarge"),
    ],
)
def test_another_tools_option_leads_to_ours(capsys: pytest.CaptureFixture[str], argv: str, ours: str) -> None:
    assert run(argv.split()) == 2
    assert f"Did you mean '{ours}'?" in capsys.readouterr().err


def test_an_option_of_a_script_leads_to_the_dashes_before_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["python", "cnn.py", "--layout", "{layout}"]
    for argv, is_told in ((command, True), (["--layuot", "--", *command], False)):
        assert run(["submit", "--local", "-L", "layout=a,b", *argv]) == 2
        assert ("comes after --." in capsys.readouterr().err) is is_told


def test_another_tools_option_that_means_nothing_here_leads_nowhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["recommend", "--workload", "vit-huge", "--gpus", "8"]) == 2
    err = capsys.readouterr().err
    assert "--gpus" in err and "Did you mean" not in err


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a100", "a100 is a GPU; name an instance type that has it: p4d.24xlarge (8), p4de.24xlarge (8)"),
        ("A100:4", "A100 is a GPU; name an instance type that has it: p4d.24xlarge (8), p4de.24xlarge (8)"),
        (
            "h100-80gb",
            "h100-80gb is a GPU; name an instance type that has it: p5.4xlarge (1), p5.48xlarge (8)",
        ),
        ("v100", "v100 is a GPU (V100 16GB) that no known instance type has; there are A100 40GB, "),
        ("p5", "its sizes are p5.4xlarge and p5.48xlarge"),
        ("p5.48xlarg", "did you mean p5.48xlarge or "),
        ("mainframe", "`fastlaunch prices` lists them"),
    ],
)
@pytest.mark.parametrize(
    "command", ["submit --dry-run", "sweep --dry-run", "estimate --samples 1M", "prices", "doctor"]
)
def test_a_gpu_or_a_family_leads_to_its_instance_types(
    capsys: pytest.CaptureFixture[str], command: str, name: str, hint: str
) -> None:
    assert run([*command.split(), "--instance", name]) == 2
    assert f"error: unknown instance '{name}'\n  {hint}" in capsys.readouterr().err


def test_help_all_shows_the_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help-all"]) == 0
    shown = capsys.readouterr().out
    assert all(f"Usage: fastlaunch {name} " in shown for name in COMMANDS)
    assert all(f"  {option.flag} " in shown for option in options_of("submit").values())


@pytest.mark.parametrize("command", ["submit", "sweep"])
def test_help_lists_the_usual_options_and_help_all_every_one(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(["help", command]) == 0
    usual = capsys.readouterr().out
    assert run([command, "--help-all"]) == 0
    every = capsys.readouterr().out
    flags = {option.flag for option in options_of(command).values()}
    assert {flag for flag in flags if f"  {flag} " in every} == flags
    assert {flag for flag in flags if f"  {flag} " in usual} == {
        option.flag for option in options_of(command).values() if option.is_usual
    }

"""Names that somebody else chose: whatever they hold, they stay within their line and steer nothing."""

import json
import re
import shlex
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from hypothesis import given
from hypothesis import strategies as st
from stubbed_aws import StubbedAws

from fastlaunch.cli.main import run
from fastlaunch.core.data import to_data
from fastlaunch.core.errors import CloudRefused
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.core.terminal import command_lines, error_lines, printable, printable_data
from fastlaunch.lifecycle.importer import find_runs
from fastlaunch.report.data import csv_text
from fastlaunch_train.records.records import Check, Eval, Phase

#: Line ends of all kinds, commands to a workflow and a terminal, what turns text round, and markup.
EVIL = (
    "\r\n::evil::\x1b[2J\x0b\u2028::evil::\u2029\x85::evil::\x9b2J\u202e\u200b\x00 ```` |<b>@me https://a.b -"
)
#: What the reader of records checks.
_CHECKED = ("kind", "schema", "run_id", "started_at", "split", "weights", "status", "precision")
#: RUN is the last run.
COMMANDS = (
    *("runs list", "runs list --output csv", "runs show RUN", "runs show RUN --output json", "status"),
    *("compare", "compare --all", "compare --output csv", "compare --baseline none", "report --format md"),
    *("runs import EVIL", "logs RUN", "runs rm recipe=*evil*", "watch RUN"),
)


def evil(data: Any) -> Any:
    """Return JSON data with EVIL behind every text but those that are checked."""
    if isinstance(data, dict):
        return {name: value if name in _CHECKED else evil(value) for name, value in data.items()}
    if isinstance(data, list):
        return list(map(evil, data))
    return f"{data}{EVIL}" if isinstance(data, str) else data


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Record files of two runs of each of two recipes."""
    for recipe, seed in (("bf16", 1), ("bf16", 2), ("te-fp8", 1), ("te-fp8", 2)):
        write_run(
            tmp_path / f"{recipe}-{seed}",
            recipe=recipe,
            run_id=f"{recipe}-{seed}",
            seed=seed,
            steps=40,
            phases=(Phase(name="kernels", seconds=1, step=0, detail="a"),),
            evals=(
                Eval(
                    step=40,
                    split="validation",
                    loss=1.0,
                    metric="m",
                    metric_value=1.0,
                    num_samples=8,
                    seconds=1.0,
                ),
            ),
            checks=(Check(name="c", passed=False, value=1.0, limit=1.0, detail="d"),),
            header={"warnings": ["w"], "commit": "0123456789"},
        )
    return tmp_path


def check_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Run the COMMANDS, of which no line may hold or begin what a name holds."""
    capsys.readouterr()
    run(["runs", "list", "--output", "json"])
    shown = json.loads(capsys.readouterr().out)
    assert "evil" in str(shown[-1])
    for command in COMMANDS:
        names = {"RUN": shown[-1]["id"], "EVIL": EVIL.replace("\0", "")}
        code = run([names.get(word, word) for word in command.split()])
        assert code in ((0, 2) if {*names, "rm", "none"} & {*command.split()} else (0,))
        out, err = capsys.readouterr()
        for line in (out + err).split("\n"):
            assert line.isprintable() and not line.startswith("::"), command
        if "md" in command:
            assert "<b>" not in out
            assert {len(re.findall(r"(?<!\\)\|", line)) for line in re.findall(r"(?m)^\|.*", out)} == {9}


def test_what_records_name_stays_within_its_line(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in records.rglob("*.jsonl"):
        lines = [json.dumps(evil(json.loads(line))) for line in path.read_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")
    header = "workload,recipe,batch_size_per_gpu,num_gpus,num_nodes,step_time_s,instance,measured_on,source"
    (records / "figures.csv").write_text(f'{header}\nvit-huge,bf16,8,1,1,0.1,unknown,2026-11-01,"a{EVIL}"\n')
    summaries = [to_data(each.summary) for each in find_runs([records]).runs.values()]
    assert len(summaries) == 5 and json.dumps(summaries, ensure_ascii=False).isprintable()
    for imported in ("Imported 5 runs", "Imported 0 runs"):
        assert run(["runs", "import", str(records)]) == 0
        assert imported in capsys.readouterr().out
    check_output(capsys)


def test_what_a_ledger_holds_already_stays_within_its_line(
    records: Path, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "import", str(records)]) == 0
    with sqlite3.connect(isolated / LEDGER_NAME) as ledger:
        for id, summary in ledger.execute("SELECT id, summary FROM runs").fetchall():
            ledger.execute(
                "UPDATE runs SET summary = ? WHERE id = ?", (json.dumps(evil(json.loads(summary))), id)
            )
        columns = ("id", "recipe", "workload", "reason", "owner", "account", "instance")
        ledger.execute(
            f"UPDATE runs SET {', '.join(f'{name} = coalesce({name}, 1) || ?1' for name in columns)}",
            (EVIL.replace("\0", ""),),
        )
        ledger.execute("UPDATE run_events SET reason = ?", (EVIL,))
    check_output(capsys)


def test_what_aws_says_is_printable(stubbed_aws: StubbedAws) -> None:
    stubbed_aws.error("sagemaker", "describe_training_job", "AccessDenied", EVIL)
    with pytest.raises(CloudRefused) as refused:
        stubbed_aws.aws.training_job("us-east-1", "job")
    assert "evil" in refused.value.message and refused.value.message.isprintable()
    instance = {
        "InstanceId": "i-1",
        "InstanceType": "p5.48xlarge",
        "State": {"Name": "terminated"},
        "LaunchTime": datetime(2026, 11, 21, tzinfo=UTC),
        "StateReason": {"Code": "Server.InternalError", "Message": EVIL},
        "Tags": [{"Key": EVIL, "Value": EVIL}],
    }
    stubbed_aws.stub("ec2").add_response("describe_instances", {"Reservations": [{"Instances": [instance]}]})
    (shown,) = stubbed_aws.aws.describe_instances("us-east-1", ids=["i-1"])
    assert shown.state_reason and shown.state_reason.isprintable()
    assert shown.tags == {printable(EVIL): printable(EVIL)}


@given(st.text() | st.text(alphabet=st.sampled_from("\x1b\x9b\r\n\t\u2028\u202e\ud800 \\na")))
def test_what_is_printable_is_one_line_and_stays_as_it_is(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable() and printable(shown) == shown
    assert printable_data({text: [text, (text, 1)]}) == {shown: [shown, [shown, 1]]}


def test_a_csv_cell_is_no_formula_and_no_second_line() -> None:
    row = {"a": "=1+1", "b": "@x\ny", "c": "-1.5e3", "d": -1, "e": "bf16", "-f": None}
    assert csv_text([row], row) == "a,b,c,d,e,'-f\n'=1+1,'@x\\ny,-1.5e3,-1,bf16,\n"


def test_markdown_finds_nothing_of_its_own_in_a_name() -> None:
    from fastlaunch.report.table import _text

    assert not re.search(r"(?<!\\)[`|*_~#\[]|<b>|@me|://|\n", _text(EVIL))
    assert _text("- 1. a\n2") == r"\- 1. a\\n2" and _text("1. a") == r"1\. a"


def test_a_long_command_continues_after_backslashes_and_stays_the_same() -> None:
    command = (
        "fastlaunch submit --local -L 'amp=fp32,bf16 x' --set a=b --repeats 3 -- python train.py --amp {amp}"
    )
    lines = command_lines(command, 50, "next").splitlines()
    assert all(len(line) <= 50 for line in lines) and lines[0].startswith("next: fastlaunch submit")
    assert shlex.split(" ".join(lines).removeprefix("next: ").replace("\\ ", "")) == shlex.split(command)
    assert command_lines(command, 200, "next") == f"next: {command}"
    # What is no command is left alone.
    assert command_lines(f"it's {'long ' * 30}", 50) == f"it's {'long ' * 30}"


def test_an_error_breaks_between_words_on_a_terminal() -> None:
    message, hint = "how often spot is lost is not known", "fastlaunch runs list --all --output json"
    assert error_lines(message, hint, None) == f"error: {message}\n  {hint}"
    assert error_lines(message, hint, 30).splitlines() == [
        "error: how often spot is lost",
        "  is not known",
        "  fastlaunch runs list --all \\",
        "    --output json",
    ]

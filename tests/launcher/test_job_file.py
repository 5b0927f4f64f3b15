"""`submit job.yaml`: options from a file, and the JSON schema of such files.

To write the schema anew after a change of the options: python tests/launcher/test_job_file.py
"""

import json
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from fake_train.launcher import fastlaunch

from fastlaunch.cli.job_file import COMMAND, job_options
from fastlaunch.cli.main import fastlaunch as group
from fastlaunch.cli.options import NAMES
from fastlaunch.cli.submit import submit

SCHEMA = Path(__file__).parents[2] / "docs" / "job.schema.json"
JOB = """
# yaml-language-server: $schema=job.schema.json
instance: [p5.48xlarge, p5en.48xlarge]
max-hours: 90min
max-cost: 300
repeats: 2
no-account-timer: true
env: {HF_HUB_OFFLINE: 1}
input:
  images: s3://acme-data/imagenet
L:
  amp: [bf16, fp32]
  lr: 1e-3
command: python train.py --amp {amp} --lr {lr}
"""


def schema() -> dict[str, Any]:
    """The JSON schema of job files."""
    text, texts, pairs = ({"$ref": f"#/$defs/{name}"} for name in ("text", "texts", "pairs"))
    command = "Run this script of your own, as words or as one text."
    properties = {COMMAND: {"description": command, "anyOf": [text, texts]}}
    for name, option in sorted(job_options(submit.params).items()):
        kinds: list[dict[str, Any]] = [{"type": "boolean"}] if option.is_flag else [text]
        if option.multiple or option.type is NAMES:
            kinds.append(texts)
        if option.multiple and "=" in (option.metavar or ""):
            kinds.append(pairs)
        kind = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        properties[name] = {"description": option.help, **kind}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "fastlaunch submit JOB.yaml",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": {
            "text": {"type": ["string", "number"]},
            "texts": {"type": "array", "items": text},
            "pairs": {"type": "object", "additionalProperties": {"anyOf": [text, texts]}},
        },
    }


def context_of(argv: list[str]) -> click.Context:
    # click keeps a command's help option as the first context named it.
    return submit.make_context("submit", argv, **group.context_settings)


def parsed(path: Path, *argv: str) -> dict[str, Any]:
    return context_of([str(path), *argv]).params


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_a_file_says_what_options_say_and_those_typed_count_before_it(job: Path) -> None:
    typed = ["--instance", "p5.48xlarge,p5en.48xlarge", "--max-hours", "90min", "--max-cost", "300"]
    typed += ["--repeats", "2", "--no-account-timer", "--env", "HF_HUB_OFFLINE=1"]
    typed += ["--input", "images=s3://acme-data/imagenet", "-L", "amp=bf16,fp32", "-L", "lr=1e-3"]
    typed += ["--", "python", "train.py", "--amp", "{amp}", "--lr", "{lr}"]
    whole = context_of(typed).params
    assert parsed(job) == whole
    changed = parsed(
        job, "--instance", "g6e.xlarge", "--repeats", "1", "--env", "A=b", "--", "python", "x.py"
    )
    assert changed == whole | {
        **{"instances": ("g6e.xlarge",), "repeats": 1, "variables": ("A=b",)},
        "command": ("python", "x.py"),
    }
    here = parsed(job, "--local")
    assert here == context_of(["--local", *typed[6:8], *typed[13:]]).params
    job.write_text("command: [python, 'my train.py']\nlocal: true\nno-account-timer: false\n")
    assert parsed(job) == context_of(["--local", "--", "python", "my train.py"]).params


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("instance: p5.48xlarge\nmax-hour: 2", "job.yml:2: the file has an unknown field `max-hour`"),
        ("max-hours: soon", "job.yml:1: max-hours: 'soon' is not a duration"),
        ("repeats: [1, 2]", "job.yml:1: repeats has"),
        ("L: {compile: [on, off]}", "put quotes around it"),
        ("local: sometimes", "job.yml:1: local is 'sometimes'; it is true or false"),
        ("output: json", "`output` is of one call, not of the job"),
        ('command: python train.py "', "cannot be divided into words"),
        ("command: python a.py && ls", "without a shell"),
        ("L: {a: ['x,y', z]}", "has a comma"),
        ("- local", "takes `name: value` pairs"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "job.yml").write_text(text)
    assert fastlaunch("submit", str(tmp_path / "job.yml")) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_or_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (("job.yaml", "does not exist"), ("train.py", "of your own write --")):
        assert fastlaunch("submit", "--local", name) == 2
        assert message in capsys.readouterr().err


def test_the_schema_is_that_of_the_options_and_takes_the_file(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fastlaunch("submit", "--job-schema") == 0
    shipped = json.loads(capsys.readouterr().out)
    assert shipped == json.loads(SCHEMA.read_text()) == schema()
    jsonschema.Draft202012Validator.check_schema(shipped)
    jsonschema.validate(yaml.safe_load(JOB), shipped)
    with pytest.raises(jsonschema.ValidationError, match="'max-hour' was unexpected"):
        jsonschema.validate({"max-hour": 2}, shipped)


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n")

"""`submit job.yaml`: options from a file, and the JSON schema of such files."""

import json
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from fake_train.launcher import fastlaunch

from fastlaunch.aws.config_text import stack_entries
from fastlaunch.cli.main import fastlaunch as group
from fastlaunch.cli.submit import submit
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.settings import load_settings
from fastlaunch.core.yaml_file import YamlFile
from fastlaunch.jobs.options import arguments

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
        ("repeats: [1, 2]", "job.yml:1: repeats is a list"),
        ("repeats: 1\nenv: {A: }", "job.yml:2: env.A is empty"),
        ("repeats: 1\ntag: [a=b, {c: d}]", "job.yml:2: tag[2] is a mapping"),
        ("repeats: 1\nenv: {A: 1, A: 2}", "job.yml:2: `A` is given twice"),
        ("repeats: !!int 010", "job.yml:1: is not YAML"),
        ("local: sometimes", "job.yml:1: local is 'sometimes', not true or false"),
        ("yes: true", "`yes` belongs to one call, not to the job"),
        ("output: json", "`output` belongs to one call, not to the job"),
        ('command: python train.py "', "cannot be divided into words"),
        ("command: python a.py && ls", "without a shell"),
        ("L: {a: ['x\\', z]}", "job.yml:1: L: 'x\\\\' and 'z' cannot be told apart"),
        ("- local", "not `name: value` pairs"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "job.yml").write_text(text)
    assert fastlaunch("submit", str(tmp_path / "job.yml")) == 2
    assert message in capsys.readouterr().err


def aliases(form: str, *, times: int, levels: int) -> str:
    """Collections of which each holds the one before so many times."""
    lines = [
        f"a{level}: &a{level} {form.format(', '.join([f'*a{level - 1}'] * times))}"
        for level in range(1, levels)
    ]
    return "\n".join(["a0: &a0 {x: y}", *lines])


@pytest.mark.parametrize(
    "text",
    [
        aliases("[{}]", times=9, levels=12),
        aliases("{{<<: [{}]}}", times=9, levels=12),
        aliases("[{}]", times=1, levels=700),
        "command: &a [*a]",
        "command: &a {<<: *a}",
        # These ended the process.
        "command: " + "[" * 100_000,
        "- " * 100_000,
        "? " * 100_000,
        "- x\n" * 400_000,
        "# " + "x" * (16 << 20),
    ],
    ids=(
        "aliases",
        "merged",
        "chain",
        "itself",
        "merged itself",
        "brackets",
        "dashes",
        "keys",
        "long",
        "bytes",
    ),
)
def test_what_grows_beyond_bounds_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert fastlaunch("submit", str(path)) == 2
    assert "more than" in capsys.readouterr().err
    monkeypatch.setenv("FASTLAUNCH_CONFIG", str(path))
    with pytest.raises(BadFile, match="more than"):
        load_settings()


def test_what_a_stack_says_is_read_within_the_same_bounds() -> None:
    with pytest.raises(UserError):
        stack_entries("[" * 100_000, "us-east-1")


def test_aliases_stand_for_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "job.yml").write_text("env: &a {A: &b b}\ntag: {B: *b, <<: *a}\n")
    assert YamlFile(tmp_path / "job.yml").data == {"env": {"A": "b"}, "tag": {"A": "b", "B": "b"}}


#: What YAML 1.1 reads as something else, and what it does not.
TEXTS = (
    *("1:30", "1:00", "010", "0o10", "0x10", "1_000", "1e3", ".5", "2.10", ".inf", ".nan", "nan", "-1", "+2"),
    *("10k", "2026-11-26", "on", "no", "Yes", "true", "False", "12:30:45", "0123", "1,000", "=", "<<"),
)


def outcome(argv: list[str], name: str) -> object:
    """What the parameter becomes; None where the command line is refused."""
    try:
        return context_of([*argv, "--instance", "p5.48xlarge"]).params[name]
    except (click.UsageError, UserError):
        return None


def keyword(name: str, value: object) -> object:
    """What the Python keyword becomes; None where it is refused."""
    try:
        return arguments({name: value}, function="submit")[name]
    except UserError:
        return None


@pytest.mark.parametrize(
    ("option", "name"),
    [
        *(("max-hours", "max_minutes"), ("max-cost", "max_cost_usd"), ("max-price", "max_price_usd")),
        *(
            ("num-nodes", "num_nodes"),
            ("batch-size", "batch_size"),
            ("repeats", "repeats"),
            ("steps", "steps"),
        ),
        *(("hang-timeout", "hang_timeout_s"), ("nproc", "nproc")),
        *(("recipe", "recipes"), ("workload", "workload"), ("baseline", "baseline")),
    ],
)
def test_a_text_is_the_same_in_a_file_and_typed(tmp_path: Path, option: str, name: str) -> None:
    path = tmp_path / "job.yaml"
    for text in TEXTS:
        path.write_text(f"{option}: {text}")
        typed = outcome([f"--{option}={text}"], name)
        assert outcome([str(path)], name) == typed, text
        # A keyword that takes numbers alone takes no text, whose unit could be another.
        if name in ("batch_size", "nproc", "recipes", "workload", "baseline"):
            assert keyword(name, text) == typed, text


@pytest.mark.parametrize(
    ("option", "name"),
    [
        *(
            ("tag", "tags"),
            ("env", "variables"),
            ("set", "overrides"),
            ("set-workload", "workload_arguments"),
        ),
        *(("input", "inputs"), ("L", "lists")),
    ],
)
def test_a_text_is_the_same_in_a_mapping_and_typed(tmp_path: Path, option: str, name: str) -> None:
    path = tmp_path / "job.yaml"
    for text in (*TEXTS, "null", "~"):
        typed = (f"{text}={text}",)
        # As keys these are the null, and the merge key, of YAML.
        key = f"'{text}'" if text in ("null", "~", "<<") else text
        for lines in (f"\n  {key}: {text}", f"\n  - {text}={text}", f"{text}={text}"):
            path.write_text(f"{option}: {lines}")
            assert outcome([str(path)], name) == typed, lines
        assert keyword(name, {text: text}) == keyword(name, f"{text}={text}") == typed
    path.write_text(f"x: &x {{a: 010}}\n{option}: &y {{b: 1}}")
    assert outcome([str(path)], name) is None
    path.write_text(f"{option}: {{<<: {{a: 010}}, b: &one 2.10, c: *one, d: [on, ~, 1:30]}}")
    assert sorted(map(str, outcome([str(path)], name) or ())) == ["a=010", "b=2.10", "c=2.10", "d=on,~,1:30"]


def test_a_value_of_a_list_may_have_commas_and_null_alone_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "L: {shape: ['[1,2]', '0.9,0.95'], amp: 'bf16,fp32'}\nbatch-size:\nmax-cost: ~\nseed: null"
    )
    params = parsed(path)
    assert params["lists"] == (r"shape=[1\,2],0.9\,0.95", "amp=bf16,fp32")
    defaults = context_of([]).params
    assert all(params[name] == defaults[name] for name in ("batch_size", "max_cost_usd", "seed"))


def test_a_file_of_windows_is_read_or_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes("\ufeffrepeats: 3\r\n".encode())
    assert parsed(path)["repeats"] == 3
    path.write_bytes("repeats: 3\r\n".encode("utf-16"))
    with pytest.raises(BadFile, match="UTF-16") as caught:
        parsed(path)
    assert "UTF-8" in str(caught.value.hint)


def test_a_file_that_is_not_there_or_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (("job.yaml", "does not exist"), ("train.py", "of your own write --")):
        assert fastlaunch("submit", "--local", name) == 2
        assert message in capsys.readouterr().err


def test_the_schema_takes_the_file(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fastlaunch("submit", "--job-schema") == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    for text in (JOB, "L: {compile: [on, true, ~], lr: 010}\nmax-hours: 1:30\nbatch-size: ~"):
        jsonschema.validate(yaml.safe_load(text), schema)
    with pytest.raises(jsonschema.ValidationError, match="'max-hour' was unexpected"):
        jsonschema.validate({"max-hour": 2}, schema)

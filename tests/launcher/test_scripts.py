"""A command of the user's own as jobs: variants, baseline, name, and what is refused before it starts."""

import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_train.launcher import CPU
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.core.errors import UserError
from fastlaunch.core.units import join_list, split_list
from fastlaunch.jobs.build import build_jobs
from fastlaunch.jobs.job import Job, Script, names_apart
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.scripts import check_travels_along, script_name

GPUS = replace(CPU, devices=("NVIDIA H200",) * 2)


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A train.py in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def specs(command: str, *lists: str, machine: Machine = CPU, **options: Any) -> tuple[Job, ...]:
    words = tuple(shlex.split(command.replace("python", shlex.quote(sys.executable), 1)))
    given = Options(command=words, lists=lists, **options)
    return build_jobs(given, machine=machine, catalogue=None).at()


def ends(jobs: tuple[Job, ...]) -> list[str]:
    """The words after `train.py` that each job runs."""
    return [" ".join(job.script.argv[2:]) for job in jobs if job.script]


def test_lists_make_every_combination_and_leave_other_braces() -> None:
    jobs = specs("python train.py --amp={amp} {batch}{other} {} '{amp} {batch}'", "amp=a,b", "batch=1,2")
    assert ends(jobs) == [f"--amp={a} {b}{{other}} {{}} {a} {b}" for a in "ab" for b in "12"]
    assert (
        [job.label for job in jobs]
        == names_apart(jobs)
        == [f"amp={amp} batch={batch}" for amp in "ab" for batch in "12"]
    )
    assert {(job.workload, job.num_gpus) for job in jobs} == {("train.py", 1)}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("[1,2],[3,4]", ("[1,2]", "[3,4]")),
        ("[0,1),(1,2]", ("[0,1)", "(1,2]")),
        ("f(a,g(b,c)),{x,y}", ("f(a,g(b,c))", "{x,y}")),
        (r"0.9\,0.95,0.9\,0.999", ("0.9,0.95", "0.9,0.999")),
        (r"(0\,1],2", ("(0,1]", "2")),
        (r"\d+,C:\x", (r"\d+", r"C:\x")),
        ("don't,won't,:(", ("don't", "won't", ":(")),
    ],
)
def test_a_comma_in_a_value_is_one_in_brackets_or_after_a_backslash(
    text: str, values: tuple[str, ...]
) -> None:
    jobs = specs("python train.py {shape}", f"shape={text}", baseline=f"shape={values[-1]}")
    assert ends(jobs) == [values[-1], *values[:-1]]
    assert split_list(join_list(values)) == values
    escaped = values[-1].replace(",", r"\,")
    assert specs("python train.py {shape}", f"shape={text}", baseline=f"shape={escaped}") == jobs


@given(st.lists(st.text(alphabet="ab,\\([{)]}\"' "), min_size=1, max_size=4))
def test_a_list_is_divided_where_it_was_joined_or_refused(values: list[str]) -> None:
    with suppress(UserError):
        assert split_list(join_list(values)) == tuple(values)


def test_a_text_is_not_searched_for_placeholders() -> None:
    assert ends(specs("python train.py {a} {b}", "a={b}", "b={a},c")) == ["{b} {a}", "{b} c"]


def test_rounds_are_interleaved_and_the_baseline_comes_first() -> None:
    jobs = specs("python train.py {a}", "a=1,2,3", baseline="a=2", repeats=2)
    assert [(job.label, job.round) for job in jobs] == [
        *(("a=2", 1), ("a=1", 1), ("a=3", 1)),
        *(("a=3", 2), ("a=1", 2), ("a=2", 2)),
    ]


def test_rounds_until_all_is_settled_are_planned_as_for_recipes() -> None:
    jobs = specs("python train.py {a}", "a=1,2", until_resolved=True, max_rounds=5)
    assert [job.round for job in jobs] == [number for number in range(1, 6) for _ in range(2)]
    assert {job.max_rounds for job in jobs} == {5}
    with pytest.raises(UserError, match="compares variants, and here is one"):
        specs("python train.py", until_resolved=True)


@pytest.mark.parametrize(
    ("baseline", "first"),
    [("b=2", "a=x b=2"), ("b=2 a=y z", "a=x b=1"), ("a=y z b=1", "a=y z b=1"), (None, "a=x b=1")],
)
def test_a_baseline_is_a_label_or_a_part_of_it(baseline: str | None, first: str) -> None:
    lists = ("a=x,y z", "b=1,2")
    if baseline == "b=2 a=y z":
        # A text with a blank is named by the whole label alone.
        with pytest.raises(UserError, match="unknown baseline"):
            specs("python train.py {a} {b}", *lists, baseline=baseline)
        return
    assert specs("python train.py {a} {b}", *lists, baseline=baseline)[0].label == first


@pytest.mark.parametrize(
    ("command", "is_noted"),
    [
        ("python train.py --amp {ampp}", True),
        ("python train.py --amp bf16", False),
        ("bash -c 'echo {amp}'", False),
    ],
)
def test_a_placeholder_of_a_python_script_that_nothing_fills_is_noted(command: str, is_noted: bool) -> None:
    words = tuple(shlex.split(command.replace("python", shlex.quote(sys.executable), 1)))
    jobs = build_jobs(Options(command=words), catalogue=None, machine=CPU)
    assert any("-L ampp=A,B" in caveat for caveat in jobs.caveats) == is_noted


def test_a_command_without_lists_is_one_job_as_it_is() -> None:
    (job,) = specs("python train.py {amp}")
    assert (ends((job,)), job.label) == (["{amp}"], "as is")


@pytest.mark.parametrize(
    "options", [{"nproc": 2, "hang_timeout_s": 90.0}, {"nproc": None}], ids=["with options", "as it is"]
)
def test_a_spec_survives_being_stored_and_says_nothing_of_training(options: dict[str, Any]) -> None:
    (first, _) = specs("python train.py {a}", "a=1,2", **options)
    stored = json.loads(json.dumps(first.to_json()))
    assert Job.from_json(stored) == first
    assert not stored.keys() & {"steps", "batch_size", "data", "seed"}
    assert stored["recipe"] == {"name": "script", "label": "a=1", "precision": "unknown"}


@pytest.mark.parametrize(
    ("machine", "nproc", "expected"), [(CPU, 3, 3), (GPUS, "gpu", 2), (GPUS, 1, 1), (GPUS, None, 1)]
)
def test_nproc_is_a_number_or_one_per_gpu(machine: Machine, nproc: int | str | None, expected: int) -> None:
    (job,) = specs("python train.py", machine=machine, nproc=nproc)
    assert job.script is not None
    assert (job.num_gpus, job.script.nproc) == (expected, None if nproc is None else expected)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -u -W ignore src/train.py --x out.py", "src/train.py"),
        ("python3.11 -m torch.distributed.run --nproc-per-node 2 train.py", "train.py"),
        ("python -c 'import x'", "python"),
        ("accelerate launch --config_file a.yaml deep/train.py", "deep/train.py"),
        ("bash -x run.sh train.py", "run.sh"),
        ("uv run train.py", "train.py"),
        ("/opt/bin/trainer --lr 1", "trainer"),
    ],
)
def test_a_command_is_called_by_its_script(command: str, name: str) -> None:
    assert script_name(shlex.split(command)) == name


@pytest.mark.parametrize(
    ("command", "lists", "options", "message"),
    [
        ("", (), {}, "no command follows --"),
        ("python nope.py", (), {}, "there is no nope.py here"),
        ("no-such-program-here x", (), {}, "there is no command no-such-program-here"),
        ("./train.py", (), {}, r"\./train.py cannot be executed"),
        ("python {name}.py", ("name=train,test",), {}, "there is no test.py here"),
        ("python train.py {b}", ("a=1,2",), {}, r"the command has no \{a\}"),
        ("python train.py {a}", ("a=",), {}, "-L a has no values"),
        ("python train.py {a}", ("a",), {}, "-L a has no values"),
        ("python train.py {a}", ("a=1,,2",), {}, "-L a has a value that is empty"),
        ("python train.py {a}", ("a=1", "a=2"), {}, "-L a is given twice"),
        ("python train.py {a}", ("=1",), {}, "is not NAME=A,B"),
        ("python train.py {a}", ("a=[1,2],[3,4",), {}, "not closed"),
        ("python train.py {a}", ("a='1,2','3,4'",), {}, "not closed"),
        ("python train.py {a}", ("a=1,1",), {}, "two variants are one command: a=1\n"),
        ("python train.py {a}{b}", ("a=1,11", "b=1,11"), {}, "one command: a=1 b=11 and a=11 b=1"),
        ("python train.py {a}", (f"a={','.join(map(str, range(1001)))}",), {}, "1,001 combinations"),
        ("python train.py {a}", ("a=1,2",), {"baseline": "a=3"}, "unknown baseline 'a=3'"),
        ("python train.py", (), {"nproc": "gpu"}, "--nproc gpu is one per GPU, and here is CPU"),
        (
            "accelerate launch train.py",
            (),
            {"nproc": 2},
            "there is no command accelerate|starts its ranks itself",
        ),
        ("bash train.py", (), {"nproc": 2}, "bash is no Python script"),
        ("python train.py", (), {"nproc": 0}, "--nproc is 0"),
        ("python train.py", (), {"repeats": 0}, "--repeats is 0"),
    ],
)
def test_what_cannot_start_is_refused(
    command: str, lists: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        specs(command, *lists, **options)


def test_options_of_training_are_refused_all_at_once() -> None:
    options = {"recipes": ("bf16",), "steps": 3, "data": "loader", "local": True}
    options["instances"] = ("p5.48xlarge",)
    with pytest.raises(UserError) as refused:
        specs("python train.py", **options)
    assert refused.value.message.endswith(": --recipe, --steps, --data, --instance")


@pytest.mark.parametrize("option", [{"lists": ("a=1",)}, {"baseline": "a=1"}, {"hang_timeout_s": 1.0}])
def test_options_of_scripts_are_refused_without_one(option: dict[str, Any]) -> None:
    options = Options(**option)
    with pytest.raises(UserError, match="no -- COMMAND follows"):
        build_jobs(options, machine=CPU, catalogue=None)


def on_aws(*command: str, options: Mapping[str, Any] | None = None, **cloud: Any) -> tuple[Job, ...]:
    """The jobs on a g5.48xlarge, which has eight GPUs."""
    from fake_summaries import CATALOGUE

    where = {"instances": ("g5.48xlarge",), "regions": ("us-east-1",), **cloud}
    request = build_jobs(Options(command=command, **(options or {}), **where), catalogue=CATALOGUE)
    return request.at(request.instances[0], "us-east-1")


@pytest.mark.parametrize(
    "nproc, num_nodes, command, ranks, num_gpus",
    [
        (None, 1, "python train.py", None, 1),
        (4, 1, "python train.py", 4, 4),
        ("gpu", 1, "python train.py", 8, 8),
        (None, 2, "python train.py", 8, 16),
        (2, 2, "python3.11 train.py", 2, 4),
        # What starts its own ranks is left alone.
        (None, 2, "torchrun train.py", None, 2),
    ],
)
def test_on_aws_a_script_has_ranks_as_asked_and_over_several_nodes_one_per_gpu(
    nproc: int | str | None, num_nodes: int, command: str, ranks: int | None, num_gpus: int
) -> None:
    more = {"num_nodes": num_nodes, "allow_tcp": True}
    (job,) = on_aws(*command.split(), options={"nproc": nproc}, **more)
    assert job.script is not None
    assert (job.script.nproc, job.num_gpus, job.num_nodes) == (ranks, num_gpus, num_nodes)
    assert (job.instance, job.terms.max_minutes) == ("g5.48xlarge", 120)


@pytest.mark.parametrize(
    "options, cloud, message",
    [
        ({"nproc": 9}, {}, "9 processes on g5.48xlarge, which has 8 GPUs"),
        ({"steps": 10}, {}, "script of your own: --steps"),
        ({"repeats": 0}, {}, "--repeats is 0"),
    ],
)
def test_what_no_machine_is_rented_for(
    options: Mapping[str, Any], cloud: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        on_aws("python", "train.py", options=options, **cloud)


@pytest.mark.parametrize(
    "command, message",
    [
        ("python train.py", None),
        ("python ./src/../train.py", None),
        ("python src", None),
        ("src/run.sh", None),
        ("/usr/bin/env python train.py", None),
        ("python -m src.run", None),
        ("python other.py", "other.py does not travel with the job: git does not track it"),
        ("./other.py", r"\./other.py does not travel"),
        ("bash gone.sh", "there is no gone.sh here, which bash is to run"),
        ("{here}/python train.py", "is of this machine alone"),
        ("python {here}/train.py", "train.py is of this machine alone"),
        ("python /opt/of/the/image.py", None),
    ],
)
def test_what_a_command_names_has_to_travel(
    command: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "other.py", "python"):
        Path(name).touch()
    script = Script(command=tuple(command.replace("{here}", str(tmp_path)).split()))
    with pytest.raises(UserError, match=message) if message else nullcontext():
        paths = {"train.py", "src/run.sh"}
        check_travels_along([script], paths, why_not="git does not track it", to_take="git add {}")

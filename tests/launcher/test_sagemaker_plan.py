"""The CreateTrainingJob request: golden plans, valid for botocore's own model, and what stands in them.

To write the golden plans anew after a change that is meant: python tests/launcher/test_sagemaker_plan.py
"""

import hashlib
import io
import json
import re
import subprocess
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.serialize import create_serializer
from botocore.validate import ParamValidator
from ec2_builders import AGENT, NEEDS, RUN_ID, SCRIPTS, catalogue, script_job
from sagemaker_builders import DIGEST, TRAINING_PLAN, training_job, training_plan_of, training_site

from fastlaunch.backends.sagemaker.plan import MAX_PENDING_S, SPOT_WAIT_S, plan_sagemaker
from fastlaunch.backends.site import Queue
from fastlaunch.backends.validate import request_problems
from fastlaunch.core.data import read as from_data
from fastlaunch.core.data import to_data
from fastlaunch.core.plan import Plan
from fastlaunch.jobs.job import Job, entrypoint_arguments
from fastlaunch_train.node.protocol import program_from_json

GOLDEN = Path(__file__).parents[1] / "plans"
SPOT = {"purchase": "spot", "checkpoint_every": 50}
KEY = "arn:aws:kms:us-east-1:123456789012:key/0a1b2c3d"
RULES: dict[str, Any] = {
    "tags": {"Owner": "ada", "cost-center": "4711"},
    "subnets": ("subnet-0a", "subnet-0b"),
    "security_groups": ("sg-0a",),
    "volume_kms_key": KEY,
    "output_kms_key": KEY,
    "encrypts_traffic": True,
    "secrets": {"HF_TOKEN": "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub-x1y2z3"},
}


def of(instance: str, num_nodes: int = 1, **changes: Any) -> Job:
    """A job on so many of them, a rank per GPU."""
    num_gpus = num_nodes * catalogue().instance(instance).num_accelerators
    return training_job(instance=instance, num_nodes=num_nodes, num_gpus=num_gpus, **changes)


def golden_plans() -> dict[str, Plan]:
    """The plans that are kept, by the name of their file: one of each shape."""
    plan, site = training_plan_of, training_site
    own = "123456789012.dkr.ecr.us-east-1.amazonaws.com/mine@sha256:" + "f" * 64
    return {
        "sagemaker-p5.48xlarge-on-demand": plan(of("p5.48xlarge"), at=site()),
        "sagemaker-p5.48xlarge-spot": plan(of("p5.48xlarge", **SPOT), at=site()),
        "sagemaker-2-p5.48xlarge-on-demand": plan(of("p5.48xlarge", 2), at=site()),
        "sagemaker-2-g5.xlarge-tcp": plan(of("g5.xlarge", 2, allow_tcp=True), at=site("g5.xlarge")),
        "sagemaker-training-plan": plan(
            of("p5.48xlarge", 2, training_plan=TRAINING_PLAN), at=site(training_plan=TRAINING_PLAN)
        ),
        "sagemaker-queue": plan(at=site(queue=Queue(name="team", priority=7, share="vision", retries=2))),
        "sagemaker-built-image": plan(
            training_job(overrides=("optimizer_impl=fused",), data="loader", num_workers=3),
            at=site(code=None, image=own),
        ),
        "sagemaker-account-with-rules": plan(at=site(**RULES)),
        # A Python script on several nodes is torchrun's.
        "sagemaker-script": plan(
            script_job(replace(SCRIPTS[0], nproc=8), "sagemaker", num_nodes=2), at=site(**NEEDS)
        ),
        "sagemaker-third-attempt": plan(
            of("p5.48xlarge", **SPOT), attempt=3, max_minutes=47, root="20261121-085959-root"
        ),
        "sagemaker-4-runs": plan(
            *(training_job(recipe=recipe) for recipe in ("bf16", "te-fp8", "te-fp8", "bf16")), max_minutes=90
        ),
    }


PLANS = golden_plans()


def written(plan: Plan) -> str:
    """The plan as it is kept."""
    return json.dumps(to_data(plan), indent=2) + "\n"


def read(name: str) -> Plan:
    """The plan that was kept under this name."""
    return from_data(Plan, json.loads((GOLDEN / f"{name}.json").read_text()), "plan")


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_the_golden_one_and_valid(name: str) -> None:
    assert read(name) == PLANS[name]
    check(PLANS[name])


def test_no_golden_plan_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("sagemaker-*.json")} == set(PLANS)


def check(plan: Plan) -> None:
    """Fails unless botocore's model and SageMaker's rules take the plan's request."""
    for service, operation_name, protocol, request in (
        ("sagemaker", "CreateTrainingJob", "json", plan.payload),
        *([("batch", "SubmitServiceJob", "rest-json", plan.request)] if plan.is_queued else ()),
    ):
        operation = operation_model(service, operation_name)
        report = ParamValidator().validate(request, operation.input_shape)
        assert not report.has_errors(), report.generate_report()
        assert list(not_in_enum(operation.input_shape, request)) == []
        # What goes over the wire is what was planned: no parameter is lost between the two.
        body = create_serializer(protocol).serialize_to_request(dict(request), operation)["body"]
        assert json.loads(body) == request
    assert plan.operation == operation_name
    assert request_problems(plan) == []


@cache
def operation_model(service: str, operation: str) -> Any:
    """botocore's model of the operation."""
    return botocore.session.get_session().get_service_model(service).operation_model(operation)


def not_in_enum(shape: Any, value: Any) -> Any:
    """Texts that the model's enumerations do not have, which botocore does not look at."""
    if shape.type_name == "structure":
        for name, each in value.items():
            yield from not_in_enum(shape.members[name], each)
    elif shape.type_name == "list":
        for each in value:
            yield from not_in_enum(shape.member, each)
    elif getattr(shape, "enum", None) and value not in shape.enum:
        yield value


def test_a_queue_is_handed_the_very_request_for_the_training_job() -> None:
    alone, queued = training_plan_of(), PLANS["sagemaker-queue"]
    assert json.loads(queued.request["serviceRequestPayload"]) == alone.request
    assert queued.request["clientToken"] == queued.request["jobName"] == alone.request["TrainingJobName"]
    assert queued.request["tags"] == {tag["Key"]: tag["Value"] for tag in alone.request["Tags"]}
    assert (queued.objects, queued.region) == (alone.objects, alone.region)
    # AWS may start it three times, each time for all of its time.
    assert queued.max_cost_usd is not None and alone.max_cost_usd is not None
    assert queued.max_cost_usd == pytest.approx(3 * alone.max_cost_usd)
    plain = training_plan_of(at=training_site(queue=Queue(name="team")))
    assert plain.max_cost_usd == alone.max_cost_usd
    assert plain.request["retryStrategy"] == {"attempts": 1}
    assert not {"schedulingPriority", "shareIdentifier"} & set(plain.request)


def test_a_payload_that_batch_would_refuse_is_refused_here() -> None:
    variables = {f"V{number}": "x" * 200 for number in range(40)}
    words = {f"team-{number}": "x" * 250 for number in range(40)}
    site = training_site(queue=Queue(name="team"), tags=words, variables=variables)
    (problem,) = request_problems(training_plan_of(at=site))
    assert "its payload has" in problem and "10,240" in problem


def test_planning_is_pure() -> None:
    assert training_plan_of() == training_plan_of()
    assert from_data(Plan, json.loads(json.dumps(to_data(training_plan_of()))), "plan") == training_plan_of()


def test_everything_of_an_attempt_lies_under_its_root() -> None:
    runs = "s3://acme-training/fastlaunch/runs"
    first, later = training_plan_of().request, training_plan_of(attempt=2, root="older").request
    assert first["TrainingJobName"] == f"{RUN_ID}-a1"
    assert first["CheckpointConfig"]["S3Uri"] == f"{runs}/{RUN_ID}"
    assert tags(first)["fastlaunch:output"] == f"{runs}/{RUN_ID}/{RUN_ID}-a1"
    assert later["CheckpointConfig"]["S3Uri"] == f"{runs}/older"
    assert tags(later)["fastlaunch:output"] == f"{runs}/older/{RUN_ID}-a2"
    # Not fetched again with the checkpoints.
    assert not first["OutputDataConfig"]["S3OutputPath"].startswith(f"{runs}/{RUN_ID}")
    top = training_plan_of(at=training_site(prefix="")).request
    assert top["CheckpointConfig"]["S3Uri"] == f"s3://acme-training/runs/{RUN_ID}"


def tags(request: Any) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in request["Tags"]}


def test_a_key_for_volumes_is_for_those_that_sagemaker_attaches() -> None:
    # p5 has local disks, whose encryption is the machine's own, and SageMaker refuses a key for them.
    with_disks = training_site(**RULES)
    attached = replace(with_disks, instance=replace(with_disks.instance, local_nvme_gb=0))
    plan = training_plan_of(at=attached)
    check(plan)
    assert plan.request["ResourceConfig"]["VolumeKmsKeyId"] == KEY
    assert "VolumeKmsKeyId" not in training_plan_of(at=with_disks).request["ResourceConfig"]


def test_the_runs_are_listed_in_order() -> None:
    fused = training_job(recipe="te-fp8", overrides=("optimizer_impl=fused",))
    jobs = [training_job(), replace(fused, session="sub-1", round=2)]
    agent, run_list = training_plan_of(*jobs).objects
    assert agent.key == f"fastlaunch/code/agent-{AGENT}.pyz"
    program = program_from_json(str(run_list.text))
    assert [(run.run_id, run.arguments) for run in program.runs] == [
        (RUN_ID, entrypoint_arguments(jobs[0])),
        ("20261121-090313-k3f9", entrypoint_arguments(jobs[1])),
    ]
    second = {"FASTLAUNCH_SESSION": "sub-1", "FASTLAUNCH_ROUND": "2"}
    assert [run.environment for run in program.runs] == [{}, second]


def test_spot_waits_an_hour_longer_than_it_may_run() -> None:
    request = training_plan_of(training_job(**SPOT), max_minutes=60).request
    assert request["EnableManagedSpotTraining"] is True
    assert request["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 3600,
        "MaxWaitTimeInSeconds": 3600 + SPOT_WAIT_S,
    }
    on_demand = training_plan_of(max_minutes=60).request
    assert "EnableManagedSpotTraining" not in on_demand
    assert on_demand["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 3600,
        "MaxPendingTimeInSeconds": MAX_PENDING_S,
    }


def test_the_metrics_find_their_numbers_in_what_is_printed() -> None:
    metrics = training_plan_of().request["AlgorithmSpecification"]["MetricDefinitions"]
    line = "fastlaunch: step=40 loss=2.314500 step_time_s=0.103400 samples_per_s=652.10"
    assert {one["Name"]: found(one["Regex"], line) for one in metrics} == {
        "loss": "2.314500",
        "step_time_s": "0.103400",
        "samples_per_s": "652.10",
    }
    small = "fastlaunch: step=40 loss=-1.5e-07 step_time_s=1e+02 samples_per_s=0"
    assert [found(one["Regex"], small) for one in metrics] == ["-1.5e-07", "1e+02", "0"]
    assert [found(one["Regex"], "step 40 loss=2.3 step_time_s=3") for one in metrics] == [None] * 3


def found(regex: str, line: str) -> str | None:
    match = re.search(regex, line)
    return match[1] if match else None


@pytest.mark.parametrize("sound", [True, False])
def test_the_containers_arguments_unpack_the_code_and_become_its_program(tmp_path: Path, sound: bool) -> None:
    program = b"#!/bin/bash\necho started\n"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        member = tarfile.TarInfo("run_sagemaker.sh")
        member.size = len(program)
        archive.addfile(member, io.BytesIO(program))
    digest = hashlib.sha256(stream.getvalue()).hexdigest()
    for folder in ("in", "code"):
        (tmp_path / folder).mkdir()
    (tmp_path / "in" / f"{digest}.tar.gz").write_bytes(stream.getvalue() if sound else b"damaged")
    algorithm = training_plan_of().request["AlgorithmSpecification"]
    assert algorithm["ContainerArguments"][3] == DIGEST
    moved = {
        "/opt/ml/input/data/code": f"{tmp_path}/in",
        "/opt/ml/output/": f"{tmp_path}/",
        "/fastlaunch": f"{tmp_path}/code",
        DIGEST: digest,
    }
    argv = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
    for there, here in moved.items():
        argv = [part.replace(there, here) if part != "fastlaunch" else part for part in argv]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    if sound:
        assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "started")
        assert not (tmp_path / "failure").exists()
    else:
        assert ran.returncode == 1
        assert (tmp_path / "failure").read_text() == "code bundle not usable\n"


def test_what_the_container_needs_is_brought_and_known_by_its_hash() -> None:
    plan = training_plan_of()
    agent, run_list = plan.objects
    channels = {
        one["ChannelName"]: one["DataSource"]["S3DataSource"]["S3Uri"]
        for one in plan.request["InputDataConfig"]
    }
    assert channels == {
        "agent": agent.uri,
        "code": f"s3://acme-training/fastlaunch/code/{DIGEST}.tar.gz",
        "runs": run_list.uri,
    }
    environment = plan.request["Environment"]
    assert environment["FASTLAUNCH_AGENT_SHA256"] == agent.sha256
    assert environment["FASTLAUNCH_RUNS_SHA256"] == run_list.sha256


def test_placeholders_are_those_that_the_request_holds() -> None:
    assert training_plan_of().placeholders == ()
    at = training_site(role="<role>", bucket="<bucket>", image="host.example/x@<image-digest>")
    jobs = {"<run-id>": training_job(), "<run-id-2>": training_job()}
    open_plan = plan_sagemaker(jobs, attempt=1, site=at, max_minutes=120)
    assert open_plan.placeholders == (
        *("bucket", "image-digest", "role", "run-id", "run-id-2", "runs-sha256"),
    )
    # Where only placeholders are in the way, nothing is refused.
    at = training_site(role="<role>", bucket="<bucket>", image="<image-digest>")
    assert request_problems(plan_sagemaker(jobs, attempt=1, site=at, max_minutes=120)) == []


def test_the_request_does_not_grow_with_its_runs() -> None:
    def size(number: int) -> int:
        jobs = {f"20261121-090312-{n:04d}": training_job() for n in range(number)}
        plan = plan_sagemaker(jobs, attempt=1, site=training_site(), max_minutes=600)
        check(plan)
        return len(json.dumps(plan.request))

    assert size(1) == size(500)


if __name__ == "__main__":
    for stem, one in PLANS.items():
        (GOLDEN / f"{stem}.json").write_text(written(one))

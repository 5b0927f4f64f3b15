"""Training jobs asked for, looked at, stopped and read: what is sent, and what is made of the answers."""

from datetime import UTC, datetime
from typing import Any

import pytest
from sagemaker_builders import training_plan_of
from stubbed_aws import StubbedAws

from fastlaunch.aws.sagemaker import LOG_LINES, TrainingJob
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NotAuthorised, QuotaExceeded, Unreachable

REGION = "us-east-1"
REQUEST = training_plan_of().request
NAME = REQUEST["TrainingJobName"]
ARN = f"arn:aws:sagemaker:{REGION}:123456789012:training-job/{NAME}"
THEN = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)


def described(**changes: Any) -> dict[str, Any]:
    """DescribeTrainingJob's answer, of a job in progress."""
    return {
        "TrainingJobName": NAME,
        "TrainingJobArn": ARN,
        "ModelArtifacts": {"S3ModelArtifacts": "s3://acme/x/output/model.tar.gz"},
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Training",
        "StoppingCondition": {"MaxRuntimeInSeconds": 7200},
        "CreationTime": THEN,
        **changes,
    }


def test_the_request_is_sent_as_it_is(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("sagemaker")
    stub.add_response("create_training_job", {"TrainingJobArn": ARN}, dict(REQUEST))
    assert stubbed_aws.aws.create_training_job(REGION, REQUEST) == ARN


def test_another_requests_name_is_refused(stubbed_aws: StubbedAws) -> None:
    other = {**REQUEST["Environment"], "FASTLAUNCH_IMAGE_DIGEST": "sha256:0"}
    stubbed_aws.error("sagemaker", "create_training_job", "ResourceInUse", "must be unique")
    stubbed_aws.stub("sagemaker").add_response("describe_training_job", described(Environment=other))
    with pytest.raises(BadConfiguration, match="must be unique") as error:
        stubbed_aws.aws.create_training_job(REGION, REQUEST)
    assert error.value.code == "ResourceInUse"
    assert "fastlaunch resume" in (error.value.hint or "")


def test_the_same_request_is_the_same_job(stubbed_aws: StubbedAws) -> None:
    # As after an answer that was lost: the second one finds the name taken by the first.
    same = {name: REQUEST[name] for name in ("Environment", "RoleArn", "CheckpointConfig")}
    stubbed_aws.error("sagemaker", "create_training_job", "InternalFailure", status=500)
    stubbed_aws.error("sagemaker", "create_training_job", "ResourceInUse")
    stubbed_aws.stub("sagemaker").add_response("describe_training_job", described(**same))
    assert stubbed_aws.aws.create_training_job(REGION, REQUEST) == ARN
    assert stubbed_aws.slept_s == [1.0]


def test_a_job_that_is_not_shown_yet_is_unknown(stubbed_aws: StubbedAws) -> None:
    stubbed_aws.error("sagemaker", "create_training_job", "ResourceInUse")
    stubbed_aws.error(
        "sagemaker", "describe_training_job", "ValidationException", "Requested resource not found."
    )
    with pytest.raises(Unreachable, match="does not show it yet"):
        stubbed_aws.aws.create_training_job(REGION, REQUEST)


@pytest.mark.parametrize(
    ("code", "message", "kind", "hint"),
    [
        (
            "ResourceLimitExceeded",
            "The account-level service limit 'ml.p5.48xlarge for training job usage' is 0 Instances",
            QuotaExceeded,
            "Service Quotas in us-east-1",
        ),
        ("AccessDeniedException", "not authorized to perform: iam:PassRole", NotAuthorised, "iam:PassRole"),
        ("AccessDeniedException", "no", NotAuthorised, "sagemaker:CreateTrainingJob"),
        ("ValidationException", "Could not assume role arn:x", BadConfiguration, "`aws.us-east-1`"),
    ],
)
def test_what_a_refusal_says(
    stubbed_aws: StubbedAws, code: str, message: str, kind: type[CloudRefused], hint: str
) -> None:
    stubbed_aws.error("sagemaker", "create_training_job", code, message)
    with pytest.raises(kind, match=code) as error:
        stubbed_aws.aws.create_training_job(REGION, REQUEST)
    assert hint in (error.value.hint or "")


def test_a_job_as_sagemaker_describes_it(stubbed_aws: StubbedAws) -> None:
    answer = described(
        TrainingJobStatus="Failed",
        SecondaryStatus="Failed",
        ResourceConfig={"InstanceType": "ml.p5en.48xlarge", "InstanceCount": 2, "VolumeSizeInGB": 200},
        FailureReason="AlgorithmError: , exit code: 1",
        TrainingStartTime=THEN,
        TrainingEndTime=THEN,
        BillableTimeInSeconds=100,
        TrainingTimeInSeconds=300,
        EnableManagedSpotTraining=True,
        SecondaryStatusTransitions=[
            {"Status": status, "StartTime": THEN, "StatusMessage": f"{status} came"}
            for status in ("Training", "Failed")
        ],
    )
    stubbed_aws.stub("sagemaker").add_response("describe_training_job", answer, {"TrainingJobName": NAME})
    assert stubbed_aws.aws.training_job(REGION, NAME) == TrainingJob(
        name=NAME,
        arn=ARN,
        region=REGION,
        status="Failed",
        secondary_status="Failed",
        created_at=THEN,
        started_at=THEN,
        ended_at=THEN,
        instance_type="ml.p5en.48xlarge",
        num_instances=2,
        is_spot=True,
        billable_s=100,
        training_s=300,
        failure_reason="AlgorithmError: , exit code: 1",
        status_message="Failed came",
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [("ValidationException", "Requested resource not found."), ("ResourceNotFound", "no such job")],
)
def test_an_unknown_job_is_none(stubbed_aws: StubbedAws, code: str, message: str) -> None:
    stubbed_aws.error("sagemaker", "describe_training_job", code, message)
    assert stubbed_aws.aws.training_job(REGION, NAME) is None


@pytest.mark.parametrize("message", ["The training job is in status Failed", "Requested resource not found."])
def test_stopping_what_has_ended_is_no_error(stubbed_aws: StubbedAws, message: str) -> None:
    stubbed_aws.error("sagemaker", "stop_training_job", "ValidationException", message)
    stubbed_aws.aws.stop_training_job(REGION, NAME)


def listed(name: str, status: str = "InProgress") -> dict[str, Any]:
    return {
        "TrainingJobName": name,
        "TrainingJobArn": ARN.replace(NAME, name),
        "CreationTime": THEN,
        "TrainingJobStatus": status,
    }


def test_only_jobs_with_our_tag_are_ours(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("sagemaker")
    asked = {"StatusEquals": "InProgress", "MaxResults": 100}
    page = {"TrainingJobSummaries": [listed(NAME), listed("somebodys-job")], "NextToken": "more"}
    stub.add_response("list_training_jobs", page, asked)
    # By its name alone it could be one of ours; the other one is not even asked for its tags.
    ours = [{"Key": "fastlaunch:run", "Value": NAME[:-3]}, {"Key": "fastlaunch:attempt", "Value": "1"}]
    stub.add_response("list_tags", {"Tags": ours[:1], "NextToken": "t"}, {"ResourceArn": ARN})
    stub.add_response("list_tags", {"Tags": ours[1:]}, {"ResourceArn": ARN, "NextToken": "t"})
    stub.add_response("describe_training_job", described(), {"TrainingJobName": NAME})
    page = {"TrainingJobSummaries": [listed("theirs-a1")]}
    stub.add_response("list_training_jobs", page, {**asked, "NextToken": "more"})
    stub.add_response("list_tags", {"Tags": []}, {"ResourceArn": ARN.replace(NAME, "theirs-a1")})
    stub.add_response(
        "list_training_jobs", {"TrainingJobSummaries": []}, {"StatusEquals": "Stopping", "MaxResults": 100}
    )
    (job,) = stubbed_aws.aws.live_training_jobs(REGION)
    assert (job.name, job.tags) == (NAME, {"fastlaunch:run": NAME[:-3], "fastlaunch:attempt": "1"})


def test_a_job_that_ended_meanwhile_is_not_live(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("sagemaker")
    stub.add_response("list_training_jobs", {"TrainingJobSummaries": [listed(NAME)]})
    stub.add_response("list_tags", {"Tags": [{"Key": "fastlaunch:run", "Value": "x"}]})
    stub.add_response("describe_training_job", described(TrainingJobStatus="Completed"))
    stub.add_response("list_training_jobs", {"TrainingJobSummaries": []})
    assert stubbed_aws.aws.live_training_jobs(REGION) == []


def streams(*names: str) -> dict[str, Any]:
    return {"logStreams": [{"logStreamName": f"{NAME}/{name}"} for name in names]}


def test_the_log_is_the_newest_lines_of_every_host(stubbed_aws: StubbedAws) -> None:
    stub, group = stubbed_aws.stub("logs"), "/aws/sagemaker/TrainingJobs"
    asked = {"logGroupName": group, "logStreamNamePrefix": f"{NAME}/"}
    stub.add_response("describe_log_streams", {**streams("algo-2-17"), "nextToken": "more"}, asked)
    stub.add_response("describe_log_streams", streams("algo-1-17"), {**asked, "nextToken": "more"})
    for host in (1, 2):
        stub.add_response(
            "get_log_events",
            {"events": [{"message": f"host {host}"}, {"message": "done"}]},
            {
                "logGroupName": group,
                "logStreamName": f"{NAME}/algo-{host}-17",
                "limit": LOG_LINES,
                "startFromHead": False,
            },
        )
    assert stubbed_aws.aws.training_log(REGION, NAME) == (
        "==> algo-1-17 <==\nhost 1\ndone\n==> algo-2-17 <==\nhost 2\ndone\n"
    )


def test_without_a_log_group_nothing_was_printed(stubbed_aws: StubbedAws) -> None:
    stubbed_aws.error("logs", "describe_log_streams", "ResourceNotFoundException", "The specified log group")
    assert stubbed_aws.aws.training_log(REGION, NAME) == ""

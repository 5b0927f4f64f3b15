"""SageMaker of the tests answers as the real one does, where the launcher depends on it."""

from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from moto_server import MotoServer
from sagemaker_builders import training_job, training_plan_of, training_site

REGION = "us-east-1"
ONCE = Config(retries={"total_max_attempts": 1, "mode": "standard"})

Create = Callable[..., Any]


@pytest.fixture
def sagemaker(aws_server: MotoServer) -> Any:
    return boto3.client("sagemaker", region_name=REGION, config=ONCE)


@pytest.fixture
def create(aws_server: MotoServer, sagemaker: Any) -> Create:
    bucket = aws_server.set_up_region(REGION).bucket
    site = training_site(bucket=bucket, role=aws_server.training_jobs.role(), code=None)

    def create(*, attempt: int = 1, **changes: Any) -> Any:
        request = training_plan_of(at=site, attempt=attempt).request
        return sagemaker.create_training_job(**{**request, **changes})["TrainingJobArn"]

    return create


NAME = training_plan_of().request["TrainingJobName"]


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(ClientError) as error:
        call()
    return error.value.response["Error"]["Code"], error.value.response["Error"]["Message"]


def test_a_job_stays_in_progress_until_it_is_moved(
    aws_server: MotoServer, sagemaker: Any, create: Create
) -> None:
    create()

    def seen() -> tuple[str, str]:
        told = sagemaker.describe_training_job(TrainingJobName=NAME)
        return told["TrainingJobStatus"], told["SecondaryStatus"]

    assert [seen(), seen(), seen()] == [("InProgress", "Starting")] * 3
    aws_server.training_jobs.move(NAME, "Downloading", "Training")
    assert seen() == ("InProgress", "Training")
    aws_server.training_jobs.end(NAME)
    assert seen() == ("Completed", "Completed")
    told = sagemaker.describe_training_job(TrainingJobName=NAME)
    assert [each["Status"] for each in told["SecondaryStatusTransitions"]] == [
        *("Starting", "Downloading", "Training", "Completed"),
    ]


def test_what_was_asked_for_can_be_read_back(sagemaker: Any, create: Create) -> None:
    asked = {"RetryStrategy": {"MaximumRetryAttempts": 2}, "Environment": {"FASTLAUNCH_TOKEN": NAME}}
    arn = create(**asked)
    told = sagemaker.describe_training_job(TrainingJobName=NAME)
    request = training_plan_of(training_job()).request
    assert {name: told[name] for name in asked} == asked
    for name in ("HyperParameters", "StoppingCondition", "ResourceConfig"):
        assert told[name] == request[name]
    assert (
        told["AlgorithmSpecification"]["MetricDefinitions"]
        == (request["AlgorithmSpecification"]["MetricDefinitions"])
    )
    assert "Tags" not in told
    tags = sagemaker.list_tags(ResourceArn=arn)["Tags"]
    assert {tag["Key"] for tag in tags} == {tag["Key"] for tag in request["Tags"]}


def test_a_name_is_used_once_even_after_the_end(
    aws_server: MotoServer, sagemaker: Any, create: Create
) -> None:
    create()
    assert refusal(create)[0] == "ResourceInUse"
    aws_server.training_jobs.end(NAME, "Failed", reason="AlgorithmError: x")
    assert refusal(create)[0] == "ResourceInUse"
    create(attempt=2)


def test_a_stopped_job_is_seen_stopping_first(aws_server: MotoServer, sagemaker: Any, create: Create) -> None:
    stopping: list[str] = []
    aws_server.training_jobs.when_stopping.append(lambda region, name: stopping.append(name))
    create()
    sagemaker.stop_training_job(TrainingJobName=NAME)
    assert stopping == [NAME]
    states = [sagemaker.describe_training_job(TrainingJobName=NAME)["TrainingJobStatus"] for _ in range(3)]
    assert states == ["Stopping", "Stopped", "Stopped"]
    code, told = refusal(lambda: sagemaker.stop_training_job(TrainingJobName=NAME))
    assert (code, told) == (
        "ValidationException",
        "The request was rejected because the training job is in status Stopped",
    )


def test_a_job_that_is_not_there_is_a_validation_exception(sagemaker: Any) -> None:
    for ask in (sagemaker.describe_training_job, sagemaker.stop_training_job):
        told = refusal(lambda ask=ask: ask(TrainingJobName="none"))
        assert told == ("ValidationException", "Requested resource not found.")


def test_what_sagemaker_refuses_is_refused(aws_server: MotoServer, create: Create) -> None:
    def refused(**changes: Any) -> str:
        code, told = refusal(lambda: create(**changes))
        assert code == "ValidationException"
        return told

    assert "Could not assume role" in refused(RoleArn="arn:aws:iam::123456789012:role/nobody")
    nowhere = {"S3Uri": "s3://nowhere/x", "LocalPath": "/opt/ml/checkpoints"}
    assert "s3://nowhere/x does not exist" in refused(CheckpointConfig=nowhere)
    code = {"S3DataType": "S3Prefix", "S3Uri": f"s3://runs-{REGION}/code/x.tar.gz"}
    channel = {"ChannelName": "code", "DataSource": {"S3DataSource": code}}
    assert "No S3 objects found under S3 URL" in refused(InputDataConfig=[channel])
    short = {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 60}
    assert "below MaxRuntimeInSeconds" in refused(EnableManagedSpotTraining=True, StoppingCondition=short)
    assert aws_server.training_jobs.jobs == {}


def test_jobs_are_listed_by_status_page_by_page(
    aws_server: MotoServer, sagemaker: Any, create: Create
) -> None:
    for attempt in range(1, 6):
        create(attempt=attempt)
    aws_server.training_jobs.end(NAME)
    names, token = [], {}
    while True:
        page = sagemaker.list_training_jobs(StatusEquals="InProgress", MaxResults=3, **token)
        names.append([each["TrainingJobName"][-2:] for each in page["TrainingJobSummaries"]])
        if "NextToken" not in page:
            break
        token = {"NextToken": page["NextToken"]}
    assert names == [["a5", "a4", "a3"], ["a2"]]
    other = boto3.client("sagemaker", region_name="eu-west-1", config=ONCE)
    assert other.list_training_jobs()["TrainingJobSummaries"] == []


def test_a_warm_pool_is_told_until_it_is_gone(aws_server: MotoServer, sagemaker: Any, create: Create) -> None:
    resources = {**training_plan_of().request["ResourceConfig"], "KeepAlivePeriodInSeconds": 600}
    create(ResourceConfig=resources)

    def pool() -> Any:
        return sagemaker.describe_training_job(TrainingJobName=NAME)["WarmPoolStatus"]

    assert pool() == {"Status": "InUse"}
    aws_server.training_jobs.end(NAME)
    assert pool() == {"Status": "Available"}
    aws_server.training_jobs.job(NAME).pool_s = 600
    assert pool() == {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 600}

"""SageMaker's quotas: found by name over all pages, and what fastlaunch's own jobs use of them."""

from datetime import UTC, datetime
from typing import Any

from ec2_builders import catalogue
from stubbed_aws import StubbedAws

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.placement.quota_checks import JOB, SPOT_JOB, training_quota

NAME = "ml.p5.48xlarge for training job usage"


def quota(name: str, code: str, value: float) -> dict[str, Any]:
    return {"QuotaName": name, "QuotaCode": code, "Value": value, "ServiceCode": "sagemaker"}


def list_quotas(
    stubbed_aws: StubbedAws, defaults: list[dict[str, Any]], *pages: list[dict[str, Any]]
) -> None:
    stub = stubbed_aws.stub("servicequotas")
    asked: dict[str, Any] = {"ServiceCode": "sagemaker", "MaxResults": 100}
    stub.add_response("list_aws_default_service_quotas", {"Quotas": defaults}, asked)
    for number, page in enumerate(pages):
        token = {"NextToken": f"t{number + 1}"} if number < len(pages) - 1 else {}
        came = {"NextToken": f"t{number}"} if number else {}
        stub.add_response("list_service_quotas", {"Quotas": page, **token}, {**asked, **came})


def test_the_accounts_quotas_stand_over_the_defaults(stubbed_aws: StubbedAws) -> None:
    other = "ml.p4d.24xlarge for training job usage"
    list_quotas(
        stubbed_aws, [quota(NAME, "L-1", 0.0), quota(other, "L-2", 0.0)], [], [quota(NAME, "L-1", 4.0)]
    )
    found = stubbed_aws.aws.quotas_by_name("us-east-1", "sagemaker")
    assert (found[NAME].value, found[NAME].is_default, found[NAME].code) == (4.0, False, "L-1")
    assert (found[other].value, found[other].is_default) == (0.0, True)


def test_own_jobs_count_by_type_and_purchase(stubbed_aws: StubbedAws) -> None:
    spot = "ml.p5.48xlarge for spot training job usage"
    list_quotas(stubbed_aws, [], [quota(NAME, "L-1", 4.0), quota(spot, "L-3", 4.0)])
    now = datetime(2026, 11, 21, tzinfo=UTC)
    token = "20261121-090312-k3f9-a1"
    arn = f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{token}"
    stub = stubbed_aws.stub("sagemaker")
    summary = {
        "TrainingJobName": token,
        "TrainingJobArn": arn,
        "CreationTime": now,
        "TrainingJobStatus": "InProgress",
    }
    stub.add_response("list_training_jobs", {"TrainingJobSummaries": [summary]})
    stub.add_response("list_tags", {"Tags": [{"Key": "fastlaunch:run", "Value": "r"}]})
    described = {
        **summary,
        "ModelArtifacts": {"S3ModelArtifacts": ""},
        "SecondaryStatus": "Training",
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "ResourceConfig": {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 2, "VolumeSizeInGB": 1},
        "StoppingCondition": {},
    }
    stub.add_response("describe_training_job", described)
    stub.add_response("list_training_jobs", {"TrainingJobSummaries": []})
    instance, ask = catalogue().instance("p5.48xlarge"), CachedCalls()

    def found(usage: str, num_nodes: int) -> Any:
        return training_quota(
            instance, usage, region="us-east-1", num_nodes=num_nodes, aws=stubbed_aws.aws, ask=ask
        )

    assert (found(JOB, 2).fits, found(JOB, 3).fits) == (True, False)
    assert str(found(JOB, 2)) == (
        "needs 2 instances of 4, 2 in use by fastlaunch: ml.p5.48xlarge for training job usage (L-1)"
    )
    assert found(SPOT_JOB, 4).fits and found(SPOT_JOB, 4).num_used == 0

"""What moto has no answer to, or a wrong one: answered here in the services' own formats."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import moto_nodes
import moto_prices
import moto_stacks
from sent_request import SentRequest

if TYPE_CHECKING:
    from moto_server import Answer, MotoServer

_XML = [("Content-Type", "text/xml;charset=UTF-8")]
_JSON = [("Content-Type", "application/x-amz-json-1.1")]

#: Size of the machine image's own volume, as a Deep Learning Base AMI's.
IMAGE_GIB = 75


def error(request: SentRequest, code: str, message: str, status: int) -> "Answer":
    """An error in the format of the request's service."""
    told = f"<Code>{code}</Code><Message>{escape(message)}</Message>"
    if "x-amz-target" in request.headers or request.service in ("batch", "scheduler"):
        return status, _JSON, json.dumps({"__type": code, "message": message}).encode()
    if request.service == "s3":
        body = f"<Error>{told}</Error>" if request.method != "HEAD" else ""
    elif request.service == "ec2":
        body = f"<Response><Errors><Error>{told}</Error></Errors><RequestID>r</RequestID></Response>"
    else:
        body = f"<ErrorResponse><Error>{told}</Error><RequestId>r</RequestId></ErrorResponse>"
    return status, _XML, body.encode()


def answer(server: "MotoServer", request: SentRequest) -> "Answer | None":
    """The answer to what moto should not be asked; None for all else."""
    make = _ANSWERS.get((request.service, request.action))
    return make(server, request) if make else None


def mend_moto() -> None:
    """Change moto itself where its answers come out wrong."""
    from moto import settings
    from moto.ec2.models.amis import Ami
    from moto.ec2.utils import filter_dict_attribute_mapping

    def volumes(image: Ami) -> list[dict[str, Any]]:
        ebs = {"SnapshotId": image.ebs_snapshot.id, "VolumeSize": IMAGE_GIB, "VolumeType": "gp3"}
        root = {"DeviceName": image.root_device_name, "Ebs": {**ebs, "DeleteOnTermination": True}}
        return [{"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"}, root]

    moto_stacks.mend()
    Ami.block_device_mappings = property(volumes)
    filter_dict_attribute_mapping["client-token"] = "client_token"
    settings.ENABLE_AMI_VALIDATION = True
    settings.EC2_ENABLE_INSTANCE_TYPE_VALIDATION = True
    # Thousands of images that nobody asks for, read again after each reset of each region.
    settings.ec2_load_default_amis = lambda: False


def add_machine_image(region: str, parameter: str) -> None:
    """The machine image of jobs, with the public parameter that names it."""
    from moto.ec2.models.amis import Ami
    from moto.ssm.models import Parameter
    from moto_server import ACCOUNT, backend

    ami_id = machine_image_id(region)
    backend("ec2", region).amis[ami_id] = Ami(
        backend("ec2", region),
        ami_id,
        name="Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20261008",
        owner_id="898082745236",
        owner_alias="amazon",
        public=True,
        virtualization_type="hvm",
        architecture="x86_64",
        root_device_type="ebs",
        root_device_name="/dev/sda1",
        region_name=region,
    )
    backend("ssm", region)._parameters[parameter].append(
        Parameter(
            account_id=ACCOUNT,
            name=parameter,
            value=ami_id,
            parameter_type="String",
            description=None,
            allowed_pattern=None,
            keyid=None,
            last_modified_date=datetime(2026, 10, 8, tzinfo=UTC),
            version=1,
            data_type="aws:ec2:image",
        )
    )


def machine_image_id(region: str) -> str:
    """Id of the machine image that jobs use in a region."""
    return "ami-0" + hashlib.sha256(region.encode()).hexdigest()[:16]


def image_digest(name: str) -> str:
    """A digest such as an image of that name could have."""
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


# EC2


def xml(action: str, body: str) -> "Answer":
    return 200, _XML, f"<{action}Response><requestId>r</requestId>{body}</{action}Response>".encode()


def _console_output(server: "MotoServer", request: SentRequest) -> "Answer":
    instance_id = request.parameters["InstanceId"]
    if instance_id not in {instance.id for instance in server.instances()}:
        message = f"The instance ID '{instance_id}' does not exist"
        return error(request, "InvalidInstanceID.NotFound", message, 400)
    text = b64encode(server.console.get(instance_id, "").encode()).decode()
    output = f"<output>{text}</output>" if text else ""
    return xml("GetConsoleOutput", f"<instanceId>{instance_id}</instanceId>{output}")


def _create_placement_group(server: "MotoServer", request: SentRequest) -> "Answer":
    name = request.parameters["GroupName"]
    key = (request.region, name)
    if key in server.placement_groups:
        message = f"The placement group '{name}' already exists."
        return error(request, "InvalidPlacementGroup.Duplicate", message, 400)
    server.placement_groups[key] = request.parameters.get("Strategy", "cluster")
    return xml("CreatePlacementGroup", "<return>true</return>")


def _describe_placement_groups(server: "MotoServer", request: SentRequest) -> "Answer":
    asked = [value for key, value in request.parameters.items() if key.startswith("GroupName.")]
    found = {
        name: kind for (region, name), kind in server.placement_groups.items() if region == request.region
    }
    found |= {name: kind for region, name, kind in moto_stacks.PLACEMENT_GROUPS if region == request.region}
    for name in asked:
        if name not in found:
            message = f"The Placement Group '{name}' is unknown."
            return error(request, "InvalidPlacementGroup.Unknown", message, 400)
    items = [
        f"<item><groupName>{name}</groupName><strategy>{kind}</strategy><state>available</state></item>"
        for name, kind in found.items()
        if not asked or name in asked
    ]
    return xml("DescribePlacementGroups", f"<placementGroupSet>{''.join(items)}</placementGroupSet>")


def _delete_placement_group(server: "MotoServer", request: SentRequest) -> "Answer":
    server.placement_groups.pop((request.region, request.parameters["GroupName"]), None)
    return xml("DeletePlacementGroup", "<return>true</return>")


# IAM, Service Quotas, ECR


def _simulate(server: "MotoServer", request: SentRequest) -> "Answer":
    results = [
        f"<member><EvalActionName>{action}</EvalActionName><EvalResourceName>*</EvalResourceName>"
        f"<EvalDecision>{'implicitDeny' if action in server.denied else 'allowed'}</EvalDecision></member>"
        for name, action in request.parameters.items()
        if name.startswith("ActionNames.member.")
    ]
    result = f"<EvaluationResults>{''.join(results)}</EvaluationResults><IsTruncated>false</IsTruncated>"
    wrapped = f"<SimulatePrincipalPolicyResult>{result}</SimulatePrincipalPolicyResult>"
    return 200, _XML, f"<SimulatePrincipalPolicyResponse>{wrapped}</SimulatePrincipalPolicyResponse>".encode()


def _quota(server: "MotoServer", request: SentRequest) -> "Answer":
    code = request.parameters["QuotaCode"]
    known = server.quotas if request.action == "GetServiceQuota" else server.default_quotas
    value = known.get((request.region, code))
    if value is None:
        return error(request, "NoSuchResourceException", f"{code}: there is no such quota", 400)
    quota = {"ServiceCode": request.parameters["ServiceCode"], "QuotaCode": code, "Value": value}
    return as_json({"Quota": quota})


def _quotas(server: "MotoServer", request: SentRequest) -> "Answer":
    """SageMaker's quotas: those that tests set by their names instead of codes."""
    known = server.quotas if request.action == "ListServiceQuotas" else server.default_quotas
    quotas = [
        {
            "ServiceCode": request.parameters["ServiceCode"],
            "QuotaName": name,
            "QuotaCode": f"L-{hashlib.sha256(name.encode()).hexdigest()[:8].upper()}",
            "Value": value,
        }
        for (region, name), value in known.items()
        if region == request.region and name.startswith("ml.")
    ]
    return as_json({"Quotas": quotas})


def _batch_get_image(server: "MotoServer", request: SentRequest) -> "Answer | None":
    from moto_server import ACCOUNT

    registry, repository = request.parameters.get("registryId", ACCOUNT), request.parameters["repositoryName"]
    if registry == ACCOUNT:
        return None
    images, failures = [], []
    for image in request.parameters["imageIds"]:
        # AWS's registries keep every image that they ever had, under its digest.
        digest = image.get("imageDigest") or server.images.get(
            (request.region, registry, repository, image.get("imageTag", ""))
        )
        if digest is None:
            reason = "Requested image not found"
            failures.append({"imageId": image, "failureCode": "ImageNotFound", "failureReason": reason})
        else:
            images.append(
                {
                    "registryId": registry,
                    "repositoryName": repository,
                    "imageId": {**image, "imageDigest": digest},
                    "imageManifest": "{}",
                }
            )
    return as_json({"images": images, "failures": failures})


def as_json(data: Mapping[str, Any]) -> "Answer":
    return 200, _JSON, json.dumps(data).encode()


_ANSWERS = {
    ("ec2", "GetConsoleOutput"): _console_output,
    ("ec2", "DescribeSpotPriceHistory"): moto_prices.spot_history,
    ("ec2", "DescribeCapacityBlockOfferings"): moto_prices.block_offerings,
    ("sagemaker", "SearchTrainingPlanOfferings"): moto_prices.plan_offerings,
    ("pricing", "GetProducts"): moto_prices.get_products,
    ("ec2", "CreatePlacementGroup"): _create_placement_group,
    ("ec2", "DescribePlacementGroups"): _describe_placement_groups,
    ("ec2", "DeletePlacementGroup"): _delete_placement_group,
    ("ec2", "DescribeCapacityReservations"): moto_nodes.describe_reservations,
    ("iam", "SimulatePrincipalPolicy"): _simulate,
    ("servicequotas", "GetServiceQuota"): _quota,
    ("servicequotas", "GetAWSDefaultServiceQuota"): _quota,
    ("servicequotas", "ListServiceQuotas"): _quotas,
    ("servicequotas", "ListAWSDefaultServiceQuotas"): _quotas,
    ("ecr", "BatchGetImage"): _batch_get_image,
    ("cloudformation", "CreateChangeSet"): moto_stacks.note_import,
}

"""Every call to AWS, typed, with its errors told apart. The only module that imports boto3.

Values come back as the dataclasses below; what goes wrong is one of `errors.CloudRefused`'s kinds. Clients
are made when first used, one per service and region, and `AWS_ENDPOINT_URL` is honoured. The file is long
since no other may do this.
"""

import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from threading import RLock
from typing import Any, TypeVar

from fastlaunch.aws.errors import Asked, refusal, unanswered
from fastlaunch.core.errors import BadConfiguration, NotAuthorised, Throttled, Unreachable
from fastlaunch.jobs.spec import DEFAULT_REGION

#: How many values a filter of EC2 takes. docs.aws.amazon.com/AWSEC2/latest/APIReference/API_Filter.html
MAX_FILTER_VALUES = 200

#: How many types DescribeInstanceTypes takes by name.
MAX_TYPES = 100
_ROUTE_TARGETS = (
    *("GatewayId", "NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "InstanceId"),
    *("VpcPeeringConnectionId", "CarrierGatewayId", "LocalGatewayId", "CoreNetworkArn"),
)

#: Between two tries: doubled from the first to the last.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 20.0

#: EC2 answers RunInstances within seconds; a busy region takes longer.
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60

#: Every kind of manifest that ECR keeps: it may convert one that was not asked for, under another digest. As
#: github.com/awslabs/amazon-ecr-containerd-resolver asks for them.
_MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who the credentials are: account number, and ARN of the user or role."""

    account: str
    arn: str


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One EC2 instance as DescribeInstances tells it.

    state: pending, running, shutting-down, stopping, stopped or terminated. is_spot: bought as spot.
    launch_time: when it was last started, with its time zone. state_reason: code and message joined by a
    colon, such as `Client.InternalError: ...`; None where EC2 gives none. transition_reason: as
    `User initiated (2026-11-21 12:00:00 GMT)`. launch_index: among those of one request, from 0.
    """

    id: str
    region: str
    zone: str | None
    instance_type: str
    state: str
    is_spot: bool
    launch_time: datetime
    token: str | None = None
    state_reason: str | None = None
    transition_reason: str | None = None
    launch_index: int = 0
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        """Whether it costs, or soon will: everything but terminated and shutting down."""
        return self.state in ("pending", "running", "stopping", "stopped")


@dataclass(frozen=True, kw_only=True)
class MachineImage:
    """An AMI: its id, its own root device's name, and the size of that volume in GiB."""

    id: str
    root_device: str
    root_gib: int


@dataclass(frozen=True, kw_only=True)
class Subnet:
    """A subnet: its zone and VPC, and whether its instances get a public address by themselves."""

    id: str
    zone: str
    vpc: str
    maps_public_ip: bool


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object in S3. key: whole, prefix included. size: bytes."""

    key: str
    size: int


@dataclass(frozen=True, kw_only=True)
class RegistryLogin:
    """What `docker login` needs for a registry host of ECR. Never printed."""

    host: str
    user: str
    password: str = field(repr=False)


class Aws:
    """AWS in every region, through boto3's usual chain of credentials.

    Every method raises CloudRefused's kinds. What does not exist is None or empty where the return type says
    so, and BadConfiguration elsewhere. What was throttled or not answered is asked again, `attempts` times in
    all, with `sleep` (seconds) in between; botocore itself repeats nothing.

    connect: makes a client of a service in a region; boto3 unless given. timeouts_s: for connecting, and for
    reading an answer.
    """

    def __init__(
        self,
        *,
        attempts: int = 5,
        timeouts_s: tuple[float, float] = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        connect: Callable[[str, str], Any] | None = None,
    ) -> None:
        self._attempts = attempts
        self._timeouts_s = timeouts_s
        self._sleep = sleep
        self._now = now
        self._connect = connect or self._connect_with_boto3
        self._session: Any = None
        self._clients: dict[tuple[str, str], Any] = {}
        self._lock = RLock()

    # Who

    def identity(self) -> Identity:
        """Who the credentials are (sts:GetCallerIdentity)."""
        told = self.ask("sts", self._home(), "GetCallerIdentity")
        return Identity(account=told["Account"], arn=told["Arn"])

    def may_pass_role(self, instance_profile: str) -> str | None:
        """Why an instance cannot get this profile, in words; None if it can.

        iam:GetInstanceProfile for the role, iam:SimulatePrincipalPolicy for iam:PassRole on it. Raises
        NotAuthorised where that may not be asked, or IAM does not tell it of who is logged in.
        """
        name = instance_profile.rpartition("/")[2]
        try:
            role = self._role(instance_profile)
        except BadConfiguration as error:
            if error.code == "NoSuchEntity":
                return f"there is no instance profile {name}"
            raise
        if role is None:
            return f"the instance profile {name} holds no role"
        return self.may_pass(role, "ec2.amazonaws.com")

    def may_pass(self, role: str, service: str) -> str | None:
        """Why who is logged in may not pass the role to `service`, in words; None if they may.

        service: such as `sagemaker.amazonaws.com`. Raises NotAuthorised where that cannot be told.
        """
        passed_to = {
            "ContextKeyName": "iam:PassedToService",
            "ContextKeyValues": [service],
            "ContextKeyType": "string",
        }
        who = self._principal(self.identity().arn)
        if not self._denied(who, ["iam:PassRole"], role, context=[passed_to]):
            return None
        name = {"ec2.amazonaws.com": "EC2", "sagemaker.amazonaws.com": "SageMaker"}.get(service, service)
        return f"who is logged in may not pass {role} to {name}: iam:PassRole is not allowed"

    def node_lacks(self, instance_profile: str, rights: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
        """Which of the `rights`, (resource, actions), the policies of the profile's role do not give.

        Resources begin with `arn:PARTITION:`, or are `*`. Raises NotAuthorised where that may not be asked.
        """
        role = self._role(instance_profile)
        return self.role_lacks(role, rights) if role is not None else []

    def role_lacks(self, role: str, rights: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
        """Which of the `rights` the role's policies do not give; see `node_lacks`."""
        partition = role.split(":")[1]
        return [
            f"{action} on {resource}"
            for resource, actions in ((to.replace("PARTITION", partition, 1), what) for to, what in rights)
            for action in self._denied(role, actions, resource)
        ]

    def _role(self, instance_profile: str) -> str | None:
        """ARN of the profile's role, None if it holds none."""
        name = instance_profile.rpartition("/")[2]
        told = self.ask("iam", self._home(), "GetInstanceProfile", subject=name, InstanceProfileName=name)
        return next((str(role["Arn"]) for role in told["InstanceProfile"]["Roles"]), None)

    def _denied(
        self, principal: str, actions: Sequence[str], resource: str, *, context: Sequence[Any] = ()
    ) -> list[str]:
        """Those of the actions that its policies refuse the principal. NotAuthorised if IAM cannot tell."""
        try:
            simulated = self.ask(
                "iam",
                self._home(),
                "SimulatePrincipalPolicy",
                PolicySourceArn=principal,
                ActionNames=list(actions),
                ResourceArns=[resource],
                ContextEntries=list(context),
            )
        except BadConfiguration as error:
            # It knows users and roles of the account, not the account itself (root) or federated users.
            raise NotAuthorised(f"IAM does not tell what {principal} may do: {error.message}") from None
        denied = [result for result in simulated["EvaluationResults"] if result["EvalDecision"] != "allowed"]
        if unknown := sorted({key for result in denied for key in result.get("MissingContextValues", ())}):
            # A policy that asks for a second factor, say, refuses a simulation that has none.
            what = ", ".join(actions)
            raise NotAuthorised(
                f"whether {principal} may {what} on {resource} depends on {', '.join(unknown)}"
            )
        return [str(result["EvalActionName"]) for result in denied]

    def _principal(self, arn: str) -> str:
        """ARN of the user or role whose policies count: the role itself of an assumed one."""
        head, _, assumed = arn.partition(":assumed-role/")
        if not assumed:
            return arn
        name = assumed.partition("/")[0]
        try:
            # Only IAM knows the path that belongs to the ARN.
            role: str = self.ask("iam", self._home(), "GetRole", RoleName=name)["Role"]["Arn"]
        except (NotAuthorised, BadConfiguration):
            return f"{head.replace(':sts:', ':iam:')}:role/{name}"
        return role

    # EC2

    def run_instances(self, region: str, request: Mapping[str, Any]) -> list[Instance]:
        """Start instances: `request` goes out as it is, and again with the same token where no answer came.

        Raises QuotaExceeded, NoCapacity, ... where nothing was started; Unreachable where that is not known.
        """
        assert request.get("ClientToken"), "without a token, asking again could start a second instance"
        purchase = request.get("InstanceMarketOptions", {}).get("MarketType", "on-demand")
        asked = Asked(
            service="ec2",
            action="RunInstances",
            region=region,
            subject=request.get("InstanceType", ""),
            instance_type=request.get("InstanceType"),
            purchase=purchase,
        )
        told = self._repeat(asked, lambda client: client.run_instances(**request))
        return [_instance(region, each) for each in told["Instances"]]

    def describe_instances(
        self,
        region: str,
        *,
        ids: Sequence[str] = (),
        tokens: Sequence[str] = (),
        tags: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Instance]:
        """The instances with these ids, client tokens or tags; all pages, in as few requests as there can be.

        Ids that EC2 does not know (yet, or any more) are left out. Asked by filter, so that one unknown id
        does not fail the others. tags: the values that a tag may have; none for any value. Where several
        are given, instances that fit all of them; none at all are asked for where nothing is given.
        """
        wanted = {"instance-id": ids, "client-token": tokens}
        filters = [_filters(name, values) for name, values in wanted.items() if values]
        for key, values in (tags or {}).items():
            filters.append(_filters(f"tag:{key}", values) if values else _filters("tag-key", [key]))
        if not filters:
            return []
        found = {}
        for chosen in product(*filters):
            pages = self.pages("ec2", region, "DescribeInstances", Filters=list(chosen), MaxResults=1000)
            for page in pages:
                for reservation in page["Reservations"]:
                    for each in reservation["Instances"]:
                        found[each["InstanceId"]] = _instance(region, each)
        return list(found.values())

    def terminate(self, region: str, ids: Sequence[str]) -> None:
        """Terminate instances; it is no error if EC2 knows one no more.

        Nor if it does not know it yet: look again at one that was started a moment ago.
        """
        if not ids:
            return
        try:
            self.ask("ec2", region, "TerminateInstances", subject=", ".join(ids), InstanceIds=list(ids))
        except BadConfiguration as error:
            if error.code != "InvalidInstanceID.NotFound":
                raise
            # EC2 terminates all or none: those that it knows one by one.
            for one in ids if len(ids) > 1 else ():
                self.terminate(region, [one])

    def console_output(self, region: str, instance_id: str) -> str:
        """What the instance wrote to its console, newest; empty if there is nothing (yet)."""
        try:
            told = self.ask("ec2", region, "GetConsoleOutput", InstanceId=instance_id, Latest=True)
        except BadConfiguration as error:
            if error.code == "InvalidInstanceID.NotFound":
                return ""
            if error.code != "UnsupportedOperation":
                raise
            # Types before Nitro keep only what they wrote when they booted.
            told = self.ask("ec2", region, "GetConsoleOutput", InstanceId=instance_id)
        output: str = told.get("Output", "")
        return output

    def zones_offering(self, region: str, instance_type: str) -> list[str]:
        """Zones of the region in which the instance type exists, sorted (DescribeInstanceTypeOfferings)."""
        pages = self.pages(
            "ec2",
            region,
            "DescribeInstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": [instance_type]}],
        )
        return sorted(each["Location"] for page in pages for each in page["InstanceTypeOfferings"])

    def spot_price_usd(self, region: str, instance_type: str, zone: str | None) -> tuple[float, str] | None:
        """Newest spot price per hour and its zone: the cheapest zone where none is given. None if unknown."""
        # From now on there is no change yet, and EC2 adds the last one before, of each zone.
        asked: dict[str, Any] = {
            "InstanceTypes": [instance_type],
            "ProductDescriptions": ["Linux/UNIX"],
            "StartTime": self._now(),
        }
        if zone is not None:
            asked["AvailabilityZone"] = zone
        newest: dict[str, tuple[datetime, float]] = {}
        for page in self.pages("ec2", region, "DescribeSpotPriceHistory", **asked):
            for each in page["SpotPriceHistory"]:
                seen = newest.get(each["AvailabilityZone"])
                if seen is None or each["Timestamp"] > seen[0]:
                    newest[each["AvailabilityZone"]] = each["Timestamp"], float(each["SpotPrice"])
        return min(((usd, where) for where, (_, usd) in newest.items()), default=None)

    def machine_image(self, region: str, ami: str) -> MachineImage:
        """The AMI. Raises BadConfiguration if it does not exist."""
        told = self.ask("ec2", region, "DescribeImages", subject=ami, ImageIds=[ami])
        image = _only(told["Images"], f"machine image {ami}", region)
        root = image["RootDeviceName"]
        sizes = [
            device["Ebs"]["VolumeSize"]
            for device in image["BlockDeviceMappings"]
            if device.get("DeviceName") == root and "VolumeSize" in device.get("Ebs", {})
        ]
        return MachineImage(id=ami, root_device=root, root_gib=_only(sizes, f"root volume of {ami}", region))

    def subnets(self, region: str, ids: Sequence[str]) -> list[Subnet]:
        """The subnets with these ids. Raises BadConfiguration if one does not exist."""
        if not ids:
            return []
        told = self.ask("ec2", region, "DescribeSubnets", subject=", ".join(ids), SubnetIds=list(ids))
        return [
            Subnet(
                id=each["SubnetId"],
                zone=each["AvailabilityZone"],
                vpc=each["VpcId"],
                maps_public_ip=each["MapPublicIpOnLaunch"],
            )
            for each in told["Subnets"]
        ]

    def security_group_vpcs(self, region: str, ids: Sequence[str]) -> dict[str, str]:
        """VPC by security group id. Raises BadConfiguration if one does not exist."""
        if not ids:
            return {}
        told = self.ask("ec2", region, "DescribeSecurityGroups", subject=", ".join(ids), GroupIds=list(ids))
        return {each["GroupId"]: each["VpcId"] for each in told["SecurityGroups"]}

    def default_vpc(self, region: str) -> str | None:
        """Id of the region's default VPC, in which EC2 starts what names no subnet; None if there is none."""
        filters = [{"Name": "is-default", "Values": ["true"]}]
        told = self.ask("ec2", region, "DescribeVpcs", Filters=filters)
        return next((str(each["VpcId"]) for each in told["Vpcs"]), None)

    def endpoints(self, region: str, vpc: str) -> frozenset[str]:
        """Services of the region that the VPC has an endpoint for, in use: `s3`, `ecr.api`, `ecr.dkr`, ..."""
        filters = [{"Name": "vpc-id", "Values": [vpc]}]
        return frozenset(
            each["ServiceName"].partition(f".{region}.")[2]
            for page in self.pages("ec2", region, "DescribeVpcEndpoints", Filters=filters)
            for each in page["VpcEndpoints"]
            if each["State"].lower() == "available"
            # An interface without it has names of its own, which nobody asks for.
            and (each["VpcEndpointType"] == "Gateway" or each.get("PrivateDnsEnabled"))
        )

    def regions(self) -> list[str]:
        """The regions that the account may use, sorted (DescribeRegions)."""
        told = self.ask("ec2", self._home(), "DescribeRegions")
        return sorted(each["RegionName"] for each in told["Regions"])

    # Systems Manager, Service Quotas

    def parameter(self, region: str, name: str) -> str:
        """The value of a parameter. Raises BadConfiguration if there is none of this name."""
        value: str = self.ask("ssm", region, "GetParameter", subject=name, Name=name)["Parameter"]["Value"]
        return value

    def quota(self, region: str, service: str, code: str) -> float | None:
        """The account's quota (servicequotas:GetServiceQuota); None where AWS has none under this code."""
        try:
            told = self.ask(
                "servicequotas",
                region,
                "GetServiceQuota",
                subject=f"{service} {code}",
                ServiceCode=service,
                QuotaCode=code,
            )
        except BadConfiguration as error:
            if error.code == "NoSuchResourceException":
                return None
            raise
        value: float | None = told["Quota"].get("Value")
        return value

    # S3

    def bucket_exists(self, region: str, bucket: str) -> bool:
        """Whether the bucket exists and may be used (HeadBucket).

        Raises BadConfiguration for one of another region, which boto3 would follow there.
        """
        try:
            told = self.ask("s3", region, "HeadBucket", subject=bucket, Bucket=bucket)
        except BadConfiguration as error:
            if error.code in ("404", "NoSuchBucket", "NotFound"):
                return False
            raise
        where = told.get("BucketRegion", region)
        if where != region:
            asked = Asked(service="s3", action="HeadBucket", region=region, subject=bucket)
            raise refusal(asked, "PermanentRedirect", f"the bucket is in {where}", status=301)
        return True

    def put_object(self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False) -> bool:
        """Store an object; False, with nothing done, if `only_new` and there is one (If-None-Match)."""
        asked = Asked(service="s3", action="PutObject", region=region, subject=f"{bucket}/{key}")
        given = {"Bucket": bucket, "Key": key, "Body": body, **({"IfNoneMatch": "*"} if only_new else {})}
        tries = 0

        def put(client: Any) -> None:
            nonlocal tries
            tries += 1
            client.put_object(**given)

        try:
            self._repeat(asked, put)
        except BadConfiguration as error:
            if error.code != "PreconditionFailed" or not only_new:
                raise
            # After a try without an answer, the object that is in the way may be this very one.
            return tries > 1 and self.get_object(region, bucket, key) == body
        return True

    def get_object(self, region: str, bucket: str, key: str) -> bytes | None:
        """The object, None if there is none."""
        asked = Asked(service="s3", action="GetObject", region=region, subject=f"{bucket}/{key}")

        def get(client: Any) -> bytes:
            body: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            return body

        try:
            return self._repeat(asked, get)
        except BadConfiguration as error:
            if error.code in ("NoSuchKey", "404"):
                return None
            raise
        except NotAuthorised as error:
            # Without the right to list, S3 denies to tell what does not exist.
            if error.code in ("AccessDenied", "403"):
                return None
            raise

    def list_objects(self, region: str, bucket: str, prefix: str) -> list[StoredObject]:
        """All objects under the prefix, sorted by key; all pages."""
        pages = self.pages("s3", region, "ListObjectsV2", subject=bucket, Bucket=bucket, Prefix=prefix)
        found = [
            StoredObject(key=each["Key"], size=each["Size"])
            for page in pages
            for each in page.get("Contents", ())
        ]
        return sorted(found, key=lambda one: one.key)

    # ECR

    def image_digest(self, region: str, account: str, repository: str, tag: str) -> str | None:
        """Digest (`sha256:...`) of a tag in an account's registry of the region; None if there is none.

        tag: or a digest, to see whether it is there. ecr:BatchGetImage, which AWS's own registries allow to
        every account.
        """
        by_digest = tag.startswith("sha256:")
        name = f"{repository}@{tag}" if by_digest else f"{repository}:{tag}"
        try:
            told = self.ask(
                "ecr",
                region,
                "BatchGetImage",
                subject=name,
                registryId=account,
                repositoryName=repository,
                imageIds=[{"imageDigest" if by_digest else "imageTag": tag}],
                acceptedMediaTypes=list(_MANIFESTS),
            )
        except BadConfiguration as error:
            if error.code == "RepositoryNotFoundException":
                return None
            raise
        for failure in told.get("failures", ()):
            if failure.get("failureCode") not in ("ImageNotFound", "ImageTagDoesNotMatchDigest"):
                asked = Asked(service="ecr", action="BatchGetImage", region=region, subject=name)
                raise refusal(asked, failure.get("failureCode", ""), failure.get("failureReason", ""))
        return next((image["imageId"]["imageDigest"] for image in told.get("images", ())), None)

    def ensure_repository(self, region: str, repository: str) -> str:
        """URI of the account's own repository, made with immutable tags if it does not exist."""
        uri: str
        try:
            uri = self._repository(region, repository)
        except BadConfiguration as error:
            if error.code != "RepositoryNotFoundException":
                raise
            try:
                told = self.ask(
                    "ecr",
                    region,
                    "CreateRepository",
                    subject=repository,
                    repositoryName=repository,
                    imageTagMutability="IMMUTABLE",
                )
            except BadConfiguration as made:
                if made.code != "RepositoryAlreadyExistsException":
                    raise
                return self._repository(region, repository)
            uri = told["repository"]["repositoryUri"]
        return uri

    def _repository(self, region: str, repository: str) -> str:
        told = self.ask(
            "ecr", region, "DescribeRepositories", subject=repository, repositoryNames=[repository]
        )
        uri: str = told["repositories"][0]["repositoryUri"]
        return uri

    def registry_login(self, region: str) -> RegistryLogin:
        """A login for the account's registry, which also opens AWS's own (GetAuthorizationToken)."""
        given = self.ask("ecr", region, "GetAuthorizationToken")["authorizationData"][0]
        user, _, password = b64decode(given["authorizationToken"]).decode().partition(":")
        host = given["proxyEndpoint"].removeprefix("https://")
        return RegistryLogin(host=host, user=user, password=password)

    # What is known before money is spent

    def running_vcpus(self, region: str) -> dict[tuple[str, str], int]:
        """vCPUs of all that runs in the region, whoever started it, by instance type and purchase option.

        Purchase is on-demand, spot or capacity-block. vCPUs are the type's own number, which quotas count
        (DescribeInstances by state, DescribeInstanceTypes).
        """
        states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        counts = Counter(
            (each["InstanceType"], each.get("InstanceLifecycle", "on-demand"))
            for page in self.pages("ec2", region, "DescribeInstances", Filters=states, MaxResults=1000)
            for reservation in page["Reservations"]
            for each in reservation["Instances"]
        )
        types = sorted({name for name, _ in counts})
        vcpus = {
            each["InstanceType"]: each["VCpuInfo"]["DefaultVCpus"]
            for start in range(0, len(types), MAX_TYPES)
            for page in self.pages(
                "ec2", region, "DescribeInstanceTypes", InstanceTypes=types[start : start + MAX_TYPES]
            )
            for each in page["InstanceTypes"]
        }
        return {(name, purchase): vcpus[name] * number for (name, purchase), number in counts.items()}

    def default_quota(self, region: str, service: str, code: str) -> float | None:
        """AWS's default of a quota (servicequotas:GetAWSDefaultServiceQuota); None if there is none.

        What counts where `quota` is None: an account whose quota was never changed may have no other.
        """
        try:
            told = self.ask(
                "servicequotas",
                region,
                "GetAWSDefaultServiceQuota",
                subject=f"{service} {code}",
                ServiceCode=service,
                QuotaCode=code,
            )
        except BadConfiguration as error:
            if error.code == "NoSuchResourceException":
                return None
            raise
        value: float | None = told["Quota"].get("Value")
        return value

    def default_routes(self, region: str, vpc: str) -> dict[str | None, str]:
        """Target of the route to 0.0.0.0/0, such as `igw-0a1b` or `nat-0a1b`, by subnet of the VPC.

        Under None that of the main route table, which serves the subnets without one of their own; "" where
        a table has no such route (DescribeRouteTables).
        """
        filters = [{"Name": "vpc-id", "Values": [vpc]}]
        found: dict[str | None, str] = {}
        for page in self.pages("ec2", region, "DescribeRouteTables", Filters=filters):
            for table in page["RouteTables"]:
                for association in table["Associations"]:
                    if association.get("Main"):
                        found[None] = _default_route(table["Routes"])
                    elif "SubnetId" in association:
                        found[association["SubnetId"]] = _default_route(table["Routes"])
        return found

    # Asking

    def ask(self, service: str, region: str, action: str, *, subject: str = "", **given: Any) -> Any:
        """The answer to one call, for the typed calls here and in the `aws_*` modules beside this one.

        action: as the service names it, such as `DescribeInstances`. subject: what it is about, for errors.
        """
        asked = Asked(service=service, action=action, region=region, subject=subject)
        return self._repeat(asked, lambda client: _method(client, action)(**given))

    def pages(
        self, service: str, region: str, action: str, *, subject: str = "", **given: Any
    ) -> Iterator[Any]:
        """The answers to one call page by page; see `ask`."""
        sent, received = (
            ("ContinuationToken", "NextContinuationToken") if service == "s3" else ("NextToken",) * 2
        )
        while True:
            page = self.ask(service, region, action, subject=subject, **given)
            yield page
            if not page.get(received):
                return
            given[sent] = page[received]

    def _repeat(self, asked: Asked, call: Callable[[Any], T]) -> T:
        """What `call` returns of the client, asked again where nothing was done or no answer came."""
        unheard: Unreachable | None = None
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, self._attempts + 1):
            try:
                return self._once(asked, call)
            except Unreachable as error:
                unheard = error
                if attempt == self._attempts:
                    raise
            except Throttled:
                if attempt == self._attempts:
                    # It says that this one did nothing, not that an earlier one did not.
                    if unheard:
                        raise unheard from None
                    raise
            except NotAuthorised:
                # Rights are looked at before the token, and a login may have ended in between.
                if unheard:
                    raise unheard from None
                raise
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise AssertionError("at least one attempt")

    def _once(self, asked: Asked, call: Callable[[Any], T]) -> T:
        return self._tell(asked, lambda: call(self._client(asked.service, asked.region)))

    def _tell(self, asked: Asked, call: Callable[[], T]) -> T:
        """What `call` returns; what botocore raises of it, as one of our errors."""
        from botocore.exceptions import ClientError

        try:
            return call()
        except ClientError as error:
            told = error.response.get("Error", {})
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise refusal(asked, told.get("Code", ""), told.get("Message", ""), status=status) from None
        except Exception as error:
            kind = unanswered(asked, tuple(each.__name__ for each in type(error).__mro__), str(error))
            if kind is None:
                raise
            raise kind from None

    def _client(self, service: str, region: str) -> Any:
        # boto3 makes clients of one session for one thread at a time.
        with self._lock:
            if (service, region) not in self._clients:
                self._clients[service, region] = self._connect(service, region)
            return self._clients[service, region]

    def _connect_with_boto3(self, service: str, region: str) -> Any:
        from botocore.config import Config

        connect_s, read_s = self._timeouts_s
        config = Config(
            connect_timeout=connect_s,
            read_timeout=read_s,
            # What is asked again, and when, is for `_repeat` to say.
            retries={"mode": "standard", "total_max_attempts": 1},
        )
        name = {"servicequotas": "service-quotas"}.get(service, service)
        try:
            return self._boto3_session().client(name, region_name=region, config=config)
        except ValueError as error:
            if "endpoint" in str(error):
                hint = "AWS_ENDPOINT_URL wants a whole URL, such as http://127.0.0.1:5000; or unset it"
                raise BadConfiguration(f"cannot reach {service}: {error}", hint) from None
            raise

    def _boto3_session(self) -> Any:
        import boto3

        with self._lock:
            if self._session is None:
                self._session = boto3.Session()
            return self._session

    def _home(self) -> str:
        """The region to ask for what all regions share: the user's own, since partitions share nothing."""
        asked = Asked(service="sts", action="GetCallerIdentity", region=DEFAULT_REGION)
        region: str | None = self._tell(asked, lambda: self._boto3_session().region_name)
        return region or DEFAULT_REGION


def _method(client: Any, action: str) -> Callable[..., Any]:
    from botocore import xform_name

    method: Callable[..., Any] = getattr(client, xform_name(action))
    return method


def _filters(name: str, values: Sequence[str]) -> list[dict[str, Any]]:
    """The filters that together ask for all `values`, one request each."""
    starts = range(0, len(values), MAX_FILTER_VALUES)
    return [{"Name": name, "Values": list(values[start : start + MAX_FILTER_VALUES])} for start in starts]


def _instance(region: str, told: Mapping[str, Any]) -> Instance:
    reason = told.get("StateReason", {})
    code, message = reason.get("Code", ""), reason.get("Message", "")
    said = message if message.startswith(code) else f"{code}: {message}"
    return Instance(
        id=told["InstanceId"],
        region=region,
        zone=told.get("Placement", {}).get("AvailabilityZone"),
        instance_type=told["InstanceType"],
        state=told["State"]["Name"],
        is_spot=told.get("InstanceLifecycle") == "spot",
        launch_time=told["LaunchTime"],
        token=told.get("ClientToken") or None,
        state_reason=said if code and code != "pending" else None,
        transition_reason=told.get("StateTransitionReason") or None,
        launch_index=told.get("AmiLaunchIndex", 0),
        tags={tag["Key"]: tag["Value"] for tag in told.get("Tags", ())},
    )


def _default_route(routes: Sequence[Mapping[str, Any]]) -> str:
    """Id of the gateway, NAT or other thing that takes what goes to the internet; empty if nothing does."""
    for route in routes:
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole":
            return next((str(route[name]) for name in _ROUTE_TARGETS if route.get(name)), "")
    return ""


def _only(found: Sequence[Any], what: str, region: str) -> Any:
    if len(found) != 1:
        raise BadConfiguration(
            f"{region} has no {what}", "correct the id, or `ami_parameter`, in the config file"
        )
    return found[0]

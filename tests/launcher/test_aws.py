"""`Aws` against an AWS on loopback: what it sends, what it makes of the answers."""

import io
import json
import subprocess
import sys
from collections.abc import Callable

import boto3
import pytest
from moto_gaps import image_digest
from moto_server import MotoServer, backend

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import StoredObject
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NotAuthorised

REGION = "us-east-1"


def test_importing_it_imports_no_boto3() -> None:
    code = (
        "import sys, fastlaunch.aws.client, fastlaunch.aws.errors as e;"
        "fastlaunch.aws.client.Aws();"
        "print([name for name in sys.modules if name.startswith(('boto3', 'botocore'))])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


# What requests name


def test_roles(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.set_up_region(REGION)
    role = "arn:aws:iam::123456789012:role/fastlaunch-node"
    assert aws.profile_role("fastlaunch-node") == role and aws.profile_role("none") is None
    backend("iam", "aws").create_instance_profile("empty", "/", [])
    assert aws.profile_role("empty") is None
    assert aws.may_pass(role, "ec2.amazonaws.com")
    (sent,) = aws_server.sent("SimulatePrincipalPolicy")
    assert sent.parameters["ResourceArns.member.1"] == role
    assert sent.parameters["ContextEntries.member.1.ContextKeyValues.member.1"] == "ec2.amazonaws.com"
    stored = ("arn:PARTITION:s3:::b/k", ("s3:GetObject", "s3:PutObject"))
    rights = (("*", ("ecr:GetAuthorizationToken",)), stored)
    assert aws.role_lacks(role, rights) == []
    sent = aws_server.sent("SimulatePrincipalPolicy")[-1]
    assert sent.parameters["PolicySourceArn"] == role
    assert sent.parameters["ResourceArns.member.1"] == "arn:aws:s3:::b/k"
    aws_server.denied |= {"iam:PassRole", "s3:PutObject"}
    assert not aws.may_pass(role, "ec2.amazonaws.com")
    assert aws.role_lacks(role, rights) == ["s3:PutObject on arn:aws:s3:::b/k"]
    aws_server.refuse("GetInstanceProfile", "AccessDenied")
    with pytest.raises(NotAuthorised, match="GetInstanceProfile"):
        aws.profile_role("fastlaunch-node")
    aws_server.refuse("SimulatePrincipalPolicy", "InvalidInput", "Invalid Entity Arn")
    with pytest.raises(NotAuthorised, match=r"IAM does not say what arn:aws:.*Invalid Entity Arn"):
        aws.may_pass(role, "ec2.amazonaws.com")


def test_an_assumed_role_is_asked_about_by_its_own_arn(aws_server: MotoServer, aws: Aws) -> None:
    role = "arn:aws:iam::123456789012:role/fastlaunch-node"
    iam = boto3.client("iam")
    iam.create_role(RoleName="admin", Path="/people/", AssumeRolePolicyDocument="{}")
    given = boto3.client("sts").assume_role(
        RoleArn="arn:aws:iam::123456789012:role/people/admin", RoleSessionName="me"
    )["Credentials"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", given["AccessKeyId"])
        patch.setenv("AWS_SECRET_ACCESS_KEY", given["SecretAccessKey"])
        patch.setenv("AWS_SESSION_TOKEN", given["SessionToken"])
        them = Aws(attempts=1)
        assert ":assumed-role/admin/me" in them.identity().arn
        assert them.may_pass(role, "ec2.amazonaws.com")
        aws_server.refuse("GetRole", "AccessDenied")
        assert them.may_pass(role, "ec2.amazonaws.com")
    first, second = (
        sent.parameters["PolicySourceArn"] for sent in aws_server.sent("SimulatePrincipalPolicy")
    )
    assert first == "arn:aws:iam::123456789012:role/people/admin"
    assert second == "arn:aws:iam::123456789012:role/admin"


# Objects


def downloaded(aws: Aws, bucket: str, key: str, *, max_bytes: int = 2**20) -> bytes | None:
    file = io.BytesIO()
    return file.getvalue() if aws.download(REGION, bucket, key, file, max_bytes=max_bytes) else None


def test_objects(aws: Aws, aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    assert aws.bucket_exists(REGION, bucket) and not aws.bucket_exists(REGION, "nobodys-bucket")
    data = bytes(range(256)) * 100
    assert aws.put_object(REGION, bucket, "p/b c/ä", data)
    assert aws.put_object(REGION, bucket, "p/b c/ä", data)
    assert downloaded(aws, bucket, "p/b c/ä") == data
    assert downloaded(aws, bucket, "p/none") is None
    assert aws.put_object(REGION, bucket, "p/a", b"1", only_new=True)
    assert not aws.put_object(REGION, bucket, "p/a", b"1", only_new=True)
    assert downloaded(aws, bucket, "p/a") == b"1"
    listed = [StoredObject(key="p/a", size=1), StoredObject(key="p/b c/ä", size=len(data))]
    assert aws.list_objects(REGION, bucket, "p/") == listed
    assert aws.list_objects(REGION, bucket, "q/") == []


def test_a_download_ends_at_its_limit(aws: Aws, aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    large = bytes(range(256)) * 2**13
    backend("s3", "aws").put_object(bucket, "large", large)
    for max_bytes in (0, 1, 2**20, len(large) - 1, len(large), len(large) + 1):
        assert downloaded(aws, bucket, "large", max_bytes=max_bytes) == large[:max_bytes]


def test_more_than_a_page_of_objects(aws: Aws, aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    keys = [f"runs/{n:04d}" for n in range(1001)]
    for key in keys:
        backend("s3", "aws").put_object(bucket, key, b"x")
    assert [one.key for one in aws.list_objects(REGION, bucket, "runs/")] == keys
    assert aws_server.counts() == {"ListObjectsV2": 2}


def test_an_object_of_ones_own_is_not_in_the_way(aws: Aws, aws_server: MotoServer) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    # The first answer was lost, and the object had been stored.
    aws.put_object(REGION, bucket, "mine", b"mine")
    aws_server.refuse("PutObject", "InternalError", times=1)
    assert not aws.put_object(REGION, bucket, "mine", b"mine", only_new=True)


def in_parts(bucket: str, body: bytes) -> None:
    """Upload `there` in two parts, with the SHA-256 of each."""
    s3 = boto3.client("s3")
    started = {"Bucket": bucket, "Key": "there"}
    upload = s3.create_multipart_upload(**started, ChecksumAlgorithm="SHA256", ChecksumType="COMPOSITE")
    started["UploadId"] = upload["UploadId"]
    parts = []
    for number, part in enumerate((body[: 5 * 2**20], body[5 * 2**20 :]), start=1):
        sent = s3.upload_part(**started, PartNumber=number, Body=part, ChecksumAlgorithm="SHA256")
        parts.append({"PartNumber": number, "ETag": sent["ETag"], "ChecksumSHA256": sent["ChecksumSHA256"]})
    s3.complete_multipart_upload(**started, MultipartUpload={"Parts": parts})


MINE, THEIRS = b"0" * (6 * 2**20), b"0" * (6 * 2**20 - 1) + b"1"


@pytest.mark.parametrize(
    ("store", "num_reads"),
    [
        (lambda bucket, body: Aws().put_object(REGION, bucket, "there", body, only_new=True), 0),
        # As by an earlier fastlaunch, or by hand: S3 keeps no SHA-256 of the whole.
        (lambda bucket, body: Aws().put_object(REGION, bucket, "there", body), 1),
        (in_parts, 1),
    ],
)
def test_what_is_there_already_is_compared(
    aws: Aws, aws_server: MotoServer, store: Callable[[str, bytes], object], num_reads: int
) -> None:
    bucket = aws_server.set_up_region(REGION).bucket or ""
    assert not aws.is_stored(REGION, bucket, "there", MINE)
    store(bucket, MINE)
    assert not aws.put_object(REGION, bucket, "there", MINE, only_new=True)
    assert len(aws_server.sent("GetObject")) == num_reads
    for other in (THEIRS, MINE[:-1]):
        with pytest.raises(BadConfiguration) as caught:
            aws.put_object(REGION, bucket, "there", other, only_new=True)
        assert f"s3://{bucket}/there" in caught.value.message
        assert f"aws s3 rm s3://{bucket}/there --region {REGION}" in (caught.value.hint or "")
    # The size alone tells the second.
    assert len(aws_server.sent("GetObject")) == 2 * num_reads
    backend("s3", "aws").delete_object(bucket, "there")
    store(bucket, THEIRS)
    with pytest.raises(BadConfiguration):
        aws.is_stored(REGION, bucket, "there", MINE)


def test_buckets_that_are_elsewhere_or_closed(aws: Aws, aws_server: MotoServer) -> None:
    aws_server.set_up_region("eu-west-2", bucket="london")
    assert aws.bucket_exists("eu-west-2", "london")
    with pytest.raises(BadConfiguration, match="eu-west-2"):
        aws.bucket_exists(REGION, "london")
    # Without the right to list, what does not exist is denied.
    aws_server.refuse("GetObject", "AccessDenied", status=403)
    assert downloaded(aws, "bucket", "key") is None


# Images


def test_digests_of_images(aws: Aws, aws_server: MotoServer) -> None:
    digest = image_digest("pytorch:2.13")
    aws_server.images[REGION, "763104351884", "pytorch", "2.13"] = digest
    assert aws.image_digest(REGION, "763104351884", "pytorch", "2.13") == digest
    assert aws.image_digest(REGION, "763104351884", "pytorch", "2.99") is None
    # Else ECR could tell the digest of what it converts an OCI image into.
    kinds = aws_server.sent("BatchGetImage")[0].parameters["acceptedMediaTypes"]
    assert "application/vnd.oci.image.index.v1+json" in kinds
    aws.ensure_repository(REGION, "fastlaunch")
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
    ecr = boto3.client("ecr", region_name=REGION)
    put = ecr.put_image(repositoryName="fastlaunch", imageManifest=json.dumps(manifest), imageTag="one")
    own = put["image"]["imageId"]["imageDigest"]
    known = {"one": own, own: own, f"sha256:{'0' * 64}": None, "none": None}
    assert {tag: aws.image_digest(REGION, "123456789012", "fastlaunch", tag) for tag in known} == known
    assert aws.image_digest(REGION, "123456789012", "nothing", "none") is None


def test_the_accounts_own_repository(aws: Aws, aws_server: MotoServer) -> None:
    uri = aws.ensure_repository(REGION, "fastlaunch")
    assert uri == f"123456789012.dkr.ecr.{REGION}.amazonaws.com/fastlaunch"
    assert aws.ensure_repository(REGION, "fastlaunch") == uri
    (made,) = aws_server.sent("CreateRepository")
    assert made.parameters["imageTagMutability"] == "IMMUTABLE"
    assert made.parameters["imageScanningConfiguration"] == {"scanOnPush": True}


def test_a_registry_login_is_not_shown(aws: Aws) -> None:
    login = aws.registry_login(REGION)
    assert login.host == f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
    assert (login.user, login.password) == ("AWS", "123456789012-auth-token")
    assert login.password not in repr(login)


@pytest.mark.parametrize(
    ("changes", "kind", "hint"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, NotAuthorised, "aws sso login"),
        ({"AWS_PROFILE": "nobody"}, BadConfiguration, "aws configure"),
        *(
            ({"AWS_ENDPOINT_URL": url}, BadConfiguration, "AWS_ENDPOINT_URL")
            for url in ("localhost:5000", "ftp://127.0.0.1:5000", "s3://acme", "http://127.0.0.1:0")
        ),
    ],
)
def test_an_environment_that_is_not_set_up(
    aws_server: MotoServer,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str | None],
    kind: type[CloudRefused],
    hint: str,
) -> None:
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(kind) as error:
        Aws(attempts=1).identity()
    assert hint in (error.value.hint or "") and error.value.exit_code == 3

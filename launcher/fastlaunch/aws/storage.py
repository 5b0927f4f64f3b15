"""Objects in S3, and container images in ECR."""

import hashlib
import io
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import closing
from typing import Any, BinaryIO

from fastlaunch.aws.errors import ApiCall, refusal
from fastlaunch.aws.session import AwsSession
from fastlaunch.aws.types import RegistryLogin, StoredObject
from fastlaunch.core.errors import BadConfiguration, NotAuthorised

_CHUNK_BYTES = 2**20
_ABSENT = "404", "NoSuchKey", "NotFound"
_NO_BUCKET = "404", "NoSuchBucket", "NotFound"
_NO_REPOSITORY = "RepositoryNotFoundException"
#: All kinds of manifests in ECR, which may convert others, under another digest.
#: github.com/awslabs/amazon-ecr-containerd-resolver accepts the same.
_MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
)


class StorageCalls(AwsSession):
    # S3

    def bucket_exists(self, region: str, bucket: str, *, owner: str | None = None) -> bool:
        """Return whether the bucket exists and may be used (s3:HeadBucket).

        owner: the account that has to own it. Raises BadConfiguration for a bucket of another region, which
        boto3 would follow there, and NotAuthorised for one of another owner.
        """
        owned = {"ExpectedBucketOwner": owner} if owner else {}
        answer = self.call_or_none(
            "s3", region, "HeadBucket", absent=_NO_BUCKET, subject=bucket, Bucket=bucket, **owned
        )
        if answer is None:
            return False
        if (at := answer.get("BucketRegion", region)) != region:
            api_call = ApiCall(service="s3", action="HeadBucket", region=region, subject=bucket)
            raise refusal(api_call, "PermanentRedirect", f"the bucket is in {at}", status=301)
        return True

    def is_bucket_of(self, region: str, bucket: str, account: str) -> bool | None:
        """Return whether the bucket is the account's; None if there is no such bucket.

        Raises BadConfiguration if it is the account's, in another region.
        """
        try:
            return self.bucket_exists(region, bucket, owner=account) or None
        except NotAuthorised as error:
            if error.code in ("403", "AccessDenied", "Forbidden"):
                return False
            raise

    def put_object(self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False) -> bool:
        """Store an object; if `only_new` and it exists, return False and do nothing (If-None-Match).

        Raises BadConfiguration if `only_new` and the existing object has other bytes.
        """
        name = f"{bucket}/{key}"
        condition = {"IfNoneMatch": "*", "ChecksumAlgorithm": "SHA256"} if only_new else {}
        try:
            self.call("s3", region, "PutObject", subject=name, Bucket=bucket, Key=key, Body=body, **condition)
        except BadConfiguration as error:
            # An earlier try that got no answer may have stored it.
            if error.code == "PreconditionFailed" and only_new and self.is_stored(region, bucket, key, body):
                return False
            raise
        return True

    def is_stored(self, region: str, bucket: str, key: str, body: bytes) -> bool:
        """Return whether the object exists. Raises BadConfiguration if it has other bytes.

        Compares the checksum that S3 keeps from the upload; without one, the bytes.
        """
        stored = self.call_or_none(
            "s3",
            region,
            "HeadObject",
            absent=_ABSENT,
            subject=f"{bucket}/{key}",
            Bucket=bucket,
            Key=key,
            ChecksumMode="ENABLED",
        )
        if stored is None:
            return False
        size, checksum = stored["ContentLength"], stored.get("ChecksumSHA256")
        problem: str | None = None
        if size != len(body):
            problem = f"it has {size:,} bytes, and not {len(body):,}"
        # After an upload in parts, the checksum is one of the parts' checksums.
        elif checksum is None or stored.get("ChecksumType") == "COMPOSITE":
            content = io.BytesIO()
            self.download(region, bucket, key, content, max_bytes=size)
            if content.getvalue() != body:
                problem = "its bytes are others"
        elif checksum != b64encode(hashlib.sha256(body).digest()).decode():
            problem = "its SHA-256 is another"
        if problem is None:
            return True
        uri = f"s3://{bucket}/{key}"
        raise BadConfiguration(
            f"{uri}, stored on {stored['LastModified']:%Y-%m-%d at %H:%M} UTC, is not what belongs there: "
            f"{problem}",
            f"find out who wrote it; then type the same again, once it is removed: `aws s3 rm {uri} --region "
            f"{region}`, for whoever has s3:DeleteObject, which fastlaunch's policies do not give",
        )

    def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool:
        """Write the object, or its first `max_bytes`, to an empty file; return False if there is none.

        Raises OSError where the file cannot be written.
        """
        api_call = ApiCall(service="s3", action="GetObject", region=region, subject=f"{bucket}/{key}")

        def get(client: Any) -> None:
            with closing(client.get_object(Bucket=bucket, Key=key)["Body"]) as body:
                # An earlier try may have written something.
                file.seek(0)
                file.truncate()
                room = max_bytes
                while room >= 0 and (chunk := body.read(_CHUNK_BYTES)):
                    file.write(chunk[:room])
                    room -= len(chunk)

        try:
            self._retry(api_call, get)
        except BadConfiguration as error:
            if error.code in _ABSENT:
                return False
            raise
        except NotAuthorised as error:
            # Without the right to list, S3 denies what does not exist.
            if error.code in ("AccessDenied", "403"):
                return False
            raise
        return True

    def has_objects(self, region: str, bucket: str, prefix: str) -> bool:
        """Return whether any key begins with the prefix."""
        answer = self.call(
            "s3", region, "ListObjectsV2", subject=bucket, Bucket=bucket, Prefix=prefix, MaxKeys=1
        )
        return bool(answer.get("KeyCount"))

    def list_objects(
        self,
        region: str,
        bucket: str,
        prefix: str,
        *,
        known_to: Callable[[str], str | None] = lambda key: None,
    ) -> list[StoredObject]:
        """Return the objects under the prefix, sorted by key; all pages.

        known_to: for the last key of a page, returns the key up to which the caller needs no list, if it is a
        later one: the next page starts after it.
        """
        objects: list[StoredObject] = []
        parameters: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        start: dict[str, str] = {}
        while True:
            page = self.call("s3", region, "ListObjectsV2", subject=bucket, **parameters, **start)
            objects += (
                StoredObject(key=entry["Key"], size=entry["Size"], modified_at=entry["LastModified"])
                for entry in page.get("Contents", ())
            )
            if not page.get("NextContinuationToken"):
                return sorted(objects, key=lambda stored: stored.key)
            last = objects[-1].key if objects else ""
            known = known_to(last) or ""
            if known > last:
                start = {"StartAfter": known}
            else:
                start = {"ContinuationToken": page["NextContinuationToken"]}

    # ECR

    def image_digest(self, region: str, account: str, repository: str, tag: str) -> str | None:
        """Return the digest (`sha256:...`) of a tag in an account's registry; None if there is none.

        tag: also a digest, to see whether it exists. Uses ecr:BatchGetImage, which AWS's own registries allow
        every account.
        """
        by_digest = tag.startswith("sha256:")
        name = f"{repository}@{tag}" if by_digest else f"{repository}:{tag}"
        answer = self.call_or_none(
            "ecr",
            region,
            "BatchGetImage",
            absent=[_NO_REPOSITORY],
            subject=name,
            registryId=account,
            repositoryName=repository,
            imageIds=[{"imageDigest" if by_digest else "imageTag": tag}],
            acceptedMediaTypes=list(_MANIFESTS),
        )
        if answer is None:
            return None
        for failure in answer.get("failures", ()):
            if failure.get("failureCode") not in ("ImageNotFound", "ImageTagDoesNotMatchDigest"):
                api_call = ApiCall(service="ecr", action="BatchGetImage", region=region, subject=name)
                raise refusal(api_call, failure.get("failureCode", ""), failure.get("failureReason", ""))
        return next((image["imageId"]["imageDigest"] for image in answer.get("images", ())), None)

    def repository_exists(self, region: str, repository: str) -> bool:
        """Return whether the account has a repository of this name."""
        return self._repository_uri(region, repository) is not None

    def ensure_repository(self, region: str, repository: str) -> str:
        """Return the URI of the account's repository.

        If there is none, make it, with immutable tags and a scan of every push.
        """
        if (uri := self._repository_uri(region, repository)) is not None:
            return uri
        made = self.call(
            "ecr",
            region,
            "CreateRepository",
            subject=repository,
            repositoryName=repository,
            imageTagMutability="IMMUTABLE",
            imageScanningConfiguration={"scanOnPush": True},
        )
        return str(made["repository"]["repositoryUri"])

    def _repository_uri(self, region: str, repository: str) -> str | None:
        answer = self.call_or_none(
            "ecr",
            region,
            "DescribeRepositories",
            absent=[_NO_REPOSITORY],
            subject=repository,
            repositoryNames=[repository],
        )
        return str(answer["repositories"][0]["repositoryUri"]) if answer else None

    def registry_login(self, region: str) -> RegistryLogin:
        """Return a login for the account's registry, which opens AWS's own too (GetAuthorizationToken)."""
        data = self.call("ecr", region, "GetAuthorizationToken")["authorizationData"][0]
        user, _, password = b64decode(data["authorizationToken"]).decode().partition(":")
        host = data["proxyEndpoint"].removeprefix("https://")
        return RegistryLogin(host=host, user=user, password=password)

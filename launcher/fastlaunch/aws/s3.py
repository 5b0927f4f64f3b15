"""Objects in S3."""

import io
from contextlib import closing
from typing import Any, BinaryIO

from fastlaunch.aws.errors import ApiCall, refusal
from fastlaunch.aws.session import AwsSession
from fastlaunch.aws.types import StoredObject
from fastlaunch.core.errors import BadConfiguration, NotAuthorised

_CHUNK_BYTES = 2**20


class S3Calls(AwsSession):
    def bucket_exists(self, region: str, bucket: str) -> bool:
        """Return whether the bucket exists and may be used (s3:HeadBucket).

        Raises BadConfiguration for a bucket of another region, which boto3 would follow there.
        """
        absent = "404", "NoSuchBucket", "NotFound"
        answer = self.call_or_none("s3", region, "HeadBucket", absent=absent, subject=bucket, Bucket=bucket)
        if answer is None:
            return False
        bucket_region = answer.get("BucketRegion", region)
        if bucket_region != region:
            api_call = ApiCall(service="s3", action="HeadBucket", region=region, subject=bucket)
            message = f"the bucket is in {bucket_region}"
            raise refusal(api_call, "PermanentRedirect", message, status=301)
        return True

    def is_bucket_of(self, region: str, bucket: str, account: str) -> bool | None:
        """Return whether the bucket is the account's; None if there is none of the name.

        Raises BadConfiguration for one of the account's in another region.
        """
        try:
            answer = self.call(
                "s3", region, "HeadBucket", subject=bucket, Bucket=bucket, ExpectedBucketOwner=account
            )
        except NotAuthorised as error:
            if error.code in ("403", "AccessDenied", "Forbidden"):
                return False
            raise
        except BadConfiguration as error:
            if error.code in ("404", "NoSuchBucket", "NotFound"):
                return None
            raise
        if (at := answer.get("BucketRegion", region)) != region:
            raise BadConfiguration(f"bucket {bucket} is in {at}, not in {region}", "name another one")
        return True

    def put_object(self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False) -> bool:
        """Store an object; return False and do nothing if `only_new` and it exists (If-None-Match)."""
        api_call = ApiCall(service="s3", action="PutObject", region=region, subject=f"{bucket}/{key}")
        condition = {"IfNoneMatch": "*"} if only_new else {}
        tries = 0

        def put(client: Any) -> None:
            nonlocal tries
            tries += 1
            client.put_object(Bucket=bucket, Key=key, Body=body, **condition)

        try:
            self._retry(api_call, put)
        except BadConfiguration as error:
            if error.code != "PreconditionFailed" or not only_new:
                raise
            # An earlier try without an answer may have stored the very object that is now in the way.
            stored = io.BytesIO()
            is_there = tries > 1 and self.download(region, bucket, key, stored, max_bytes=len(body) + 1)
            return is_there and stored.getvalue() == body
        return True

    def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool:
        """Write the object, or its first `max_bytes`, to an empty file; return False if there is none.

        Raises OSError where the file cannot be written.
        """
        api_call = ApiCall(service="s3", action="GetObject", region=region, subject=f"{bucket}/{key}")

        def get(client: Any) -> None:
            with closing(client.get_object(Bucket=bucket, Key=key)["Body"]) as body:
                # What a try before this one has written.
                file.seek(0)
                file.truncate()
                room = max_bytes
                while room >= 0 and (chunk := body.read(_CHUNK_BYTES)):
                    file.write(chunk[:room])
                    room -= len(chunk)

        try:
            self._retry(api_call, get)
        except BadConfiguration as error:
            if error.code in ("NoSuchKey", "404"):
                return False
            raise
        except NotAuthorised as error:
            # Without the right to list, S3 answers "denied" for what does not exist.
            if error.code in ("AccessDenied", "403"):
                return False
            raise
        return True

    def has_objects(self, region: str, bucket: str, prefix: str) -> bool:
        """Return whether any key begins so."""
        answer = self.call(
            "s3", region, "ListObjectsV2", subject=bucket, Bucket=bucket, Prefix=prefix, MaxKeys=1
        )
        return bool(answer.get("KeyCount"))

    def list_objects(self, region: str, bucket: str, prefix: str) -> list[StoredObject]:
        """Return all objects under the prefix, sorted by key; all pages."""
        pages = self.paginate("s3", region, "ListObjectsV2", subject=bucket, Bucket=bucket, Prefix=prefix)
        objects = [
            StoredObject(key=each["Key"], size=each["Size"], modified_at=each["LastModified"])
            for page in pages
            for each in page.get("Contents", ())
        ]
        return sorted(objects, key=lambda stored: stored.key)

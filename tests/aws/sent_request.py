"""A request to AWS as it came over the wire, with what it asks for told apart."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import parse_qsl, unquote

#: Of a larger body only the size is kept: checkpoints would fill the memory.
MAX_KEPT_BYTES = 256 * 1024

#: What EventBridge Scheduler calls a request, by method; a name follows `/schedules/` in the path.
_SCHEDULES = {"POST": "CreateSchedule", "DELETE": "DeleteSchedule", "GET": "ListSchedules"}

#: What Batch calls a request, by its path below /v1/.
_BATCH = {
    name.lower(): name
    for name in (
        "DescribeJobQueues",
        "DescribeSchedulingPolicies",
        "DescribeServiceJob",
        "GetJobQueueSnapshot",
        "ListServiceJobs",
        "SubmitServiceJob",
        "TerminateServiceJob",
    )
}

#: What S3 calls a request, by method, whether it names an object, and what its query holds.
_S3_QUERIES = {"uploads": "CreateMultipartUpload", "list-type": "ListObjectsV2", "delete": "DeleteObjects"}


@dataclass(frozen=True, kw_only=True)
class SentRequest:
    """service: as it is signed for, such as ec2, s3, ssm, servicequotas. action: `RunInstances`.

    parameters: the form as it was sent (`{"NetworkInterface.1.InterfaceType": "efa"}`), JSON as data, or the
    query of an S3 request with `Bucket` and `Key`. body: as sent, empty if it was larger than
    MAX_KEPT_BYTES. status: of the answer, 0 before there is one.
    """

    method: str
    path: str
    service: str
    region: str
    action: str
    parameters: Mapping[str, Any]
    headers: Mapping[str, str]
    body: bytes
    size: int
    status: int = 0

    def user_data(self) -> str:
        """The user data of RunInstances, decoded."""
        from base64 import b64decode

        return b64decode(self.parameters["UserData"]).decode()

    def tags(self, resource: str = "instance") -> dict[str, str]:
        """The tags that RunInstances gives to what it makes."""
        found = {}
        for name, kind in self.parameters.items():
            if re.fullmatch(r"TagSpecification\.\d+\.ResourceType", name) and kind == resource:
                prefix = name.removesuffix("ResourceType")
                for key, value in self.parameters.items():
                    if re.fullmatch(re.escape(prefix) + r"Tag\.\d+\.Key", key):
                        found[value] = self.parameters[key.removesuffix("Key") + "Value"]
        return found


def read_request(environ: dict[str, Any]) -> SentRequest:
    """The request of a WSGI `environ`, whose body can still be read afterwards."""
    source = environ["wsgi.input"]
    if environ.get("wsgi.input_terminated") or environ.get("HTTP_TRANSFER_ENCODING"):
        body = source.read()
    else:
        body = source.read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = BytesIO(body)
    if environ.pop("HTTP_TRANSFER_ENCODING", None) is not None:
        environ["CONTENT_LENGTH"] = str(len(body))
    headers = {
        key.removeprefix("HTTP_").replace("_", "-").lower(): value
        for key, value in environ.items()
        if isinstance(value, str) and (key.startswith("HTTP_") or key in ("CONTENT_TYPE", "CONTENT_LENGTH"))
    }
    return request_of(
        environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""), headers, body
    )


def request_of(method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> SentRequest:
    """The request that consists of these parts; names of headers in small letters."""
    scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/", headers.get("authorization", ""))
    region, service = scope.groups() if scope else ("", "s3")
    asked = dict(parse_qsl(query, keep_blank_values=True))
    target = headers.get("x-amz-target", "")
    parameters: dict[str, Any]
    if target:
        action = target.rpartition(".")[2]
        parameters = json.loads(body or b"{}")
    elif service == "scheduler":
        action = _SCHEDULES.get(method, "")
        parameters = {**asked, "Name": path.rpartition("/schedules/")[2], **json.loads(body or b"{}")}
    elif service == "batch":
        name = path.removeprefix("/v1/")
        action, parameters = _BATCH.get(name, name), json.loads(body or b"{}")
    elif service == "s3":
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        action = _s3_action(method, bool(bucket), bool(key), asked)
        parameters = {**asked, "Bucket": bucket, "Key": key}
    else:
        parameters = asked | dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
        action = parameters.get("Action", "")
    return SentRequest(
        method=method,
        path=path,
        service=service,
        region=region,
        action=action,
        parameters=parameters,
        headers=headers,
        body=body if len(body) <= MAX_KEPT_BYTES else b"",
        size=len(body),
    )


def _s3_action(method: str, has_bucket: bool, has_key: bool, query: Mapping[str, str]) -> str:
    for name, action in _S3_QUERIES.items():
        if name in query:
            return action
    if "partNumber" in query:
        return "UploadPart"
    if "uploadId" in query and method == "POST":
        return "CompleteMultipartUpload"
    verb = {"GET": "Get", "PUT": "Put", "HEAD": "Head", "DELETE": "Delete", "POST": "Post"}.get(
        method, method
    )
    if has_key:
        return f"{verb}Object"
    if not has_bucket:
        return "ListBuckets"
    return {"PUT": "CreateBucket", "GET": "ListObjects"}.get(method, f"{verb}Bucket")

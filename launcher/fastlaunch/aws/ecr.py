"""Container images in ECR."""

from base64 import b64decode

from fastlaunch.aws.errors import ApiCall, refusal
from fastlaunch.aws.session import AwsSession
from fastlaunch.aws.types import RegistryLogin

#: All kinds of manifests in ECR, which may convert others, under another digest.
#: github.com/awslabs/amazon-ecr-containerd-resolver accepts the same.
_MANIFESTS = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
)


_NO_REPOSITORY = "RepositoryNotFoundException"


class EcrCalls(AwsSession):
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

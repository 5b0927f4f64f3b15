"""The program that a node runs by itself: user data, made from a template. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

#: EC2's limit, before base64. docs.aws.amazon.com/AWSEC2, "Run commands when you launch an EC2 instance".
MAX_USER_DATA_BYTES = 16_384


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """One run to do: arguments of the entrypoint after `--output DIR`, which the node adds itself.

    environment: for this run's container, on top of the program's.
    """

    run_id: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class NodeProgram:
    """What one node does: pull an image, train the runs one after another, upload everything, shut down.

    runs_uri: `s3://bucket/prefix/runs`, under which every run's checkpoints lie as
    `<run id>/checkpoints/step-*.pt`. output: `<runs_uri>/<first run id>/attempt-<n>`, where this attempt
    writes; a stop is asked for by an object `abort` there.
    code_uri, code_sha256: the code bundle, None if the image holds the code.
    image: by digest; its registry host is what stands before the first slash, and image_region is ECR's.
    max_minutes: after which the machine turns itself off, whatever happens.
    num_gpus: 0 for a machine without. environment: for every container.
    """

    token: str
    attempt: int
    region: str
    output: str
    runs_uri: str
    code_uri: str | None
    code_sha256: str | None
    image: str
    image_region: str
    max_minutes: int
    num_gpus: int
    has_instance_store: bool
    has_nvswitch: bool
    is_spot: bool
    runs: tuple[NodeRun, ...]
    environment: Mapping[str, str]


def render_user_data(program: NodeProgram) -> str:
    """The shell script of `program`. Raises UserError if it is larger than EC2 takes."""
    raise NotImplementedError

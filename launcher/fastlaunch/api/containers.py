"""`submit --local --container --backend sagemaker`: a training job rehearsed in containers here."""

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from fastlaunch.api.context import AppContext, local_settings
from fastlaunch.backends.site import Site
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import CodeBundle
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.lifecycle.rehearsal import RehearsalBackend
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: Stands for SageMaker's machine in the request, whose place this one takes.
_HERE = InstanceType(
    name="local",
    accelerator="none",
    num_accelerators=1,
    vcpus=1,
    memory_gib=1,
    network_gbps=1,
    num_network_cards=1,
    num_efa_interfaces=0,
    local_nvme_gb=0,
    purchase_options=(),
    source="this machine",
)


def containers(
    context: AppContext, jobs: Sequence[JobSpec], options: Options
) -> tuple[RehearsalBackend, tuple[JobSpec, ...]]:
    """Return the backend of the rehearsal, and the jobs as they are in its containers.

    Makes the code bundle, kept with the runs, if the image lacks it. Raises UserError where the SageMaker SDK
    or docker is missing, and for what stays outside of the containers.
    """
    specs = jobs_in_containers(jobs, num_nodes=options.num_nodes, image=options.image)
    if find_spec("sagemaker") is None or find_spec("sagemaker.train") is None:
        raise UserError(
            "a rehearsal in containers needs the SageMaker SDK, which is not installed",
            f"{INSTALL_EXTRA.format('sagemaker')} (about 1 GB)",
        )
    if which("docker") is None:
        raise UserError("a rehearsal in containers needs docker with compose", "install docker")
    image, code, stored = options.image, None, None
    if image is None:
        path, separator, _ = specs[0].workload.rpartition(".py:")
        user_file = Path(f"{path}.py") if separator else None
        image, code, stored = _image_and_code(context, options.base_image, user_file)
    site = Site(
        instance=_HERE,
        region=context.settings.region,
        backend="sagemaker",
        role="<role>",
        bucket="rehearsal",
        prefix="",
        image=image,
        code=stored,
        volume_gib=1,
    )
    backend = RehearsalBackend(
        local_settings(context.settings.home, context.machine, os.environ),
        site=site,
        code=code,
        max_minutes=options.max_minutes,
        has_gpus=bool(context.machine.devices),
    )
    return backend, specs


def jobs_in_containers(jobs: Sequence[JobSpec], *, num_nodes: int, image: str | None) -> tuple[JobSpec, ...]:
    """Return the jobs on a container for each node, which find each other over TCP.

    Raises UserError for what stays outside of the containers. Absolute paths are those of one's own image.
    """
    for job in jobs:
        outside = (job.inputs.data.partition(":")[2], job.inputs.model, job.inputs.tokenizer)
        for path in filter(None, outside):
            if Path(path).exists() and not (image and Path(path).is_absolute()):
                raise UserError(
                    f"{path} is on this machine, not in the container",
                    "leave it out, rehearse without --container, or give --image and its path there",
                )
    return tuple(
        replace(job, num_nodes=num_nodes, num_gpus=num_nodes * job.num_gpus, image=image, allow_tcp=True)
        for job in jobs
    )


def _image_and_code(
    context: AppContext, base_image: str | None, user_file: Path | None
) -> tuple[str, Path, CodeBundle]:
    """Return AWS's image in its public gallery, and the bundle that a job would get, as a file here."""
    from fastlaunch.catalog.container_images import find_base_image, public_uri
    from fastlaunch.jobs.code_bundle import make_bundle
    from fastlaunch.jobs.wheels import wheel_folder

    base = find_base_image(base_image, flavour="ec2", today=context.today)
    bundle = make_bundle(
        base, user_file=user_file, commit=context.commit, wheels=wheel_folder(context.settings)
    )
    path = context.settings.home.absolute() / "code" / bundle.sha256 / f"{bundle.sha256}.tar.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bundle.data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "free some space") from None
    return public_uri(base), path, CodeBundle.under("", sha256=bundle.sha256, commit=bundle.commit)

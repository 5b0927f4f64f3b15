"""`submit --local --container --backend sagemaker`: a training job rehearsed in containers here."""

import os
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from fastlaunch.backends.site import Site
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import CodeBundle
from fastlaunch.jobs.build import Jobs
from fastlaunch.lifecycle.rehearsal import RehearsalBackend
from fastlaunch.lifecycle.world import World, local_settings
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: Placeholder for SageMaker's machine in the request; this machine takes its place.
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


def containers(world: World, jobs: Jobs) -> RehearsalBackend:
    """Return the backend that rehearses the jobs.

    If the image has no training code, make the code bundle and keep it with the runs. Raises UserError where
    the SageMaker SDK or docker is missing.
    """
    options = jobs.options
    if find_spec("sagemaker") is None or find_spec("sagemaker.train") is None:
        raise UserError(
            "a rehearsal in containers needs the SageMaker SDK, which is not installed",
            f"{INSTALL_EXTRA.format('sagemaker')} (about 1 GB)",
        )
    if which("docker") is None:
        raise UserError("a rehearsal in containers needs docker with compose", "install docker")
    image, code, stored = options.image, None, None
    if image is None:
        image, code, stored = _image_and_code(world, jobs)
    site = Site(
        instance=_HERE,
        region=world.settings.region,
        backend="sagemaker",
        role="<role>",
        bucket="rehearsal",
        prefix="",
        image=image,
        code=stored,
        volume_gib=1,
    )
    return RehearsalBackend(
        local_settings(world.settings.home, world.machine, os.environ),
        site=site,
        code=code,
        max_minutes=options.max_minutes,
        has_gpus=bool(world.machine.devices),
    )


def _image_and_code(world: World, jobs: Jobs) -> tuple[str, Path, CodeBundle]:
    """Return AWS's image in the public gallery, and the code bundle of a job as a local file."""
    from fastlaunch.catalog.container_images import find_base_image, public_uri
    from fastlaunch.jobs.code_bundle import make_bundle
    from fastlaunch.jobs.wheels import wheel_folder

    base = find_base_image(jobs.options.base_image, flavour="ec2", today=world.today)
    bundle = make_bundle(
        base, user_file=jobs.user_file, commit=world.commit, wheels=wheel_folder(world.settings)
    )
    path = world.settings.home.absolute() / "code" / bundle.sha256 / f"{bundle.sha256}.tar.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bundle.data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "free some space") from None
    return public_uri(base), path, CodeBundle.under("", sha256=bundle.sha256, commit=bundle.commit)

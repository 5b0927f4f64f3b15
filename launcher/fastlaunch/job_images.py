"""The images that a job starts from, looked up: the machine's, and its container's by digest."""

from typing import TYPE_CHECKING

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws, MachineImage
from fastlaunch.core.errors import BadConfiguration, NotAuthorised
from fastlaunch.core.settings import RegionSettings, Settings

if TYPE_CHECKING:
    from fastlaunch.base_image_file import BaseImage


def machine_image(aws: Aws, ask: AskOnce, settings: Settings, region: str) -> MachineImage:
    """The AMI that the region's parameter names, with its own root device."""
    name = settings.aws.get(region, RegionSettings()).ami_parameter
    return ask(aws.machine_image, region, ask(aws.parameter, region, name))


def container_image(aws: Aws, ask: AskOnce, base: "BaseImage", region: str) -> str:
    """AWS's own image in the region, by the digest that its tag has now."""
    from fastlaunch.catalog.container_images import image_uri, registry_account

    account = registry_account(region)
    digest = ask(aws.image_digest, region, account, base.repository, base.tag)
    if digest is None:
        raise BadConfiguration(
            f"the registry of AWS in {region} ({account}) has no image {base.name}",
            "give another one to submit, such as --base-image 2.12",
        )
    return image_uri(base, region, digest)


def is_own_image_seen(aws: Aws, ask: AskOnce, uri: str, region: str) -> bool:
    """Whether the user's image is there: False if it may not be looked at, which the machine's role may.

    Raises BadConfiguration if it is not there, or not where a job in the region can name it.
    """
    from fastlaunch.catalog.container_images import own_image

    image = own_image(uri, region)
    try:
        digest = ask(aws.image_digest, region, image.account, image.repository, image.digest)
    except NotAuthorised:
        return False
    if digest is None:
        raise BadConfiguration(
            f"{region} has no image {uri}",
            f"fastlaunch build --push --region {region} ends with one that it has",
        )
    return True

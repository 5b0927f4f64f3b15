"""`fastlaunch build`: an image of one's own, with the training code in it, built here and pushed to ECR."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from fastlaunch.base_image_file import FLAVOURS, BaseImage
from fastlaunch.catalog.container_images import (
    find_base_image,
    image_uri,
    public_uri,
    registry,
    registry_account,
    registry_host,
)
from fastlaunch.cli.cloud_options import split_names
from fastlaunch.cli.context import Surroundings, surroundings
from fastlaunch.cli.options import confirm, next_command, yes_option
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.core.settings import RegionSettings
from fastlaunch.image_extras import wanted_of, with_extras
from fastlaunch.images.build import (
    DEFAULT_REPOSITORY,
    BaseReference,
    ImageBuild,
    check_repository,
    context_files,
    context_without_wheels,
    ort_base,
    ort_context,
    write_context,
)
from fastlaunch.images.container_builder import (
    Command,
    build_command,
    find_builder,
    login_command,
    no_builder,
    push_command,
    run_command,
)
from fastlaunch.images.wheels import fetch_wheels, wanted_pins

_OWN_ACCOUNT = "<account>"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to build, and where to: `repository` of the account's registry in `region`.

    base: None for the image with ORTModule, which has one of its own. extras: what pip installs in it.
    """

    base: BaseImage | None
    extras: tuple[str, ...]
    push: bool
    region: str
    repository: str
    yes: bool


@click.command(short_help="Build an image with the training code in it; --push it to ECR.")
@click.option("--base", metavar="TAG", help="AWS's image to start from.  [default: the newest]")
@click.option("--push", is_flag=True, help="Upload it to ECR, into a repository made for it if need be.")
@click.option(
    "--flavour",
    type=click.Choice(FLAVOURS),
    default="ec2",
    show_default=True,
    help="Whose variant of AWS's image.",
)
@click.option(
    "--with",
    "extras",
    multiple=True,
    metavar="NAME",
    help="What AWS's images lack and some recipes need: transformers, lightning, torchao; may be repeated.",
)
@click.option("--ort", is_flag=True, help="Instead: ORTModule with the old versions that it works with.")
@click.option("--region", metavar="REGION", help="Of the registries.  [default: the config's]")
@click.option("--repository", metavar="NAME", help="In ECR.  [default: the config's, else fastlaunch]")
@click.option("--dry-run", is_flag=True, help="Print the commands and the context; build and ask nothing.")
@yes_option
def build(
    base: str | None,
    push: bool,
    flavour: str,
    extras: tuple[str, ...],
    ort: bool,
    region: str | None,
    repository: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Build an image with the training code in it; --push it to ECR.

    `submit` needs none: it sends the training code along with AWS's own image. Build one to add to it, or to
    keep code and environment under one digest. Language models need one --with transformers. Prints the
    image's name, with --push by its digest.
    """
    around = surroundings()
    where = region or around.settings.region
    registry(where)
    name = repository or around.settings.aws.get(where, RegionSettings()).repository or DEFAULT_REPOSITORY
    check_repository(name)
    if ort and (base or extras or flavour != "ec2"):
        raise UserError("--ort is an image of its own", "leave out --base, --flavour and --with")
    asked = Asked(
        base=None if ort else find_base_image(base, flavour=flavour, today=around.now().date()),
        extras=wanted_of([name for given in extras for name in split_names(given)]),
        push=push,
        region=where,
        repository=name,
        yes=yes,
    )
    for doubt in asked.base.doubts(around.now().date()) if asked.base else ():
        _tell(f"warning: {doubt}")
    click.echo(_dry_run(around, asked) if dry_run else _build(around, asked))


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _with_extras(files: Mapping[str, bytes], asked: Asked) -> dict[str, bytes]:
    """The context whose Dockerfile has pip install what was asked for."""
    if asked.extras:
        _tell(f"pip installs in the image, from the network: {', '.join(asked.extras)}")
    return {**files, "Dockerfile": with_extras(files["Dockerfile"], asked.extras)}


def _dry_run(around: Surroundings, asked: Asked) -> str:
    """The context with sizes and the commands, with placeholders for what only AWS can tell."""
    files = context_files(_wheels(around)) if asked.base else ort_context()
    builder = find_builder()
    if builder is None:
        _tell(f"warning: {no_builder().message}; the commands are docker's with buildx")
    reference = ort_base()
    if asked.base:
        uri = image_uri(asked.base, asked.region, "<base-digest>")
        reference = BaseReference(uri=uri, digest="<base-digest>")
    build = ImageBuild(
        base=asked.base,
        reference=reference,
        files=_with_extras(files or context_without_wheels(), asked),
        commit=around.commit,
    )
    name = f"{_registry_name(asked, _OWN_ACCOUNT)}:{build.kind}-<content>"
    logins, building, pushing = _commands(builder or "buildx", asked, build, name, "<context>")
    if asked.push and files is not None:
        _tell(_upload(build))
    lines = ["context:", *_listing(build.files, fetched=files is not None), "commands:"]
    return "\n".join([*lines, *(f"  {command}" for command in (*logins, building, *pushing))])


def _listing(files: Mapping[str, bytes], *, fetched: bool) -> list[str]:
    """Sizes of the context's top folders and files."""
    sizes: dict[str, list[int]] = {}
    for name, content in sorted(files.items()):
        top, slash, _ = name.partition("/")
        sizes.setdefault(top + slash, []).append(len(content))
    lines = [
        f"  {top:<14} {_megabytes(sum(each)):>9}" + (f"  {len(each)} files" if top.endswith("/") else "")
        for top, each in sizes.items()
    ]
    if not fetched:
        lines.append(f"  site/          {' and '.join(map(str, wanted_pins()))}, not fetched yet")
    return lines


def _upload(build: ImageBuild) -> str:
    """How much goes up, as far as that is known before."""
    return (
        f"to upload: about {_megabytes(build.upload_size)} of its own, and the base's layers, 10 GB or more,"
        " unless an earlier push has brought them to this repository"
    )


def _build(around: Surroundings, asked: Asked) -> str:
    """Name of the built image: by digest in ECR, or by tag on this machine."""
    builder = find_builder()
    if builder is None:
        raise no_builder()
    reference, files = _starting_point(around, asked)
    build = ImageBuild(
        base=asked.base, reference=reference, files=_with_extras(files, asked), commit=around.commit
    )
    if not asked.push:
        name = f"{asked.repository}:{build.tag}"
        _tell(f"building {name}: {_megabytes(build.size)} over {reference.uri}")
        _carry_out(around, asked, builder, build, name)
        next_command("fastlaunch build --push")
        return name
    account = around.aws.identity().account
    repository = _registry_name(asked, account)
    digest = around.aws.image_digest(asked.region, account, asked.repository, build.tag)
    if digest is None:
        _tell(f"building {repository}:{build.tag}: {_megabytes(build.size)} over {reference.uri}")
        _tell(_upload(build))
        confirm("Build and upload?", yes=asked.yes)
        _carry_out(around, asked, builder, build, f"{repository}:{build.tag}")
        digest = around.aws.image_digest(asked.region, account, asked.repository, build.tag)
        if digest is None:
            raise UserError(f"{repository} has no {build.tag} after the push", "try again")
    else:
        _tell(f"{build.tag} is there already: nothing to build")
    recipe = "te-fp8" if asked.base else "ort --workload gpt2-xsmall"
    next_command(f"fastlaunch submit --image {repository}@{digest} --instance p5.48xlarge --recipe {recipe}")
    return f"{repository}@{digest}"


def _starting_point(around: Surroundings, asked: Asked) -> tuple[BaseReference, dict[str, bytes]]:
    """The base image and the context, for which wheels are fetched."""
    if asked.base is None:
        return ort_base(), ort_context()
    wheels = _wheels(around)
    fetch_wheels(wanted_pins(), wheels, python=asked.base.python)
    files = context_files(wheels)
    assert files is not None, "the wheels have just been fetched"
    return _reference(around, asked, asked.base), files


def _reference(around: Surroundings, asked: Asked, base: BaseImage) -> BaseReference:
    """The base image by digest; by tag in AWS's gallery, and said so, where AWS cannot be asked."""
    region = asked.region
    try:
        digest = around.aws.image_digest(region, registry_account(region), base.repository, base.tag)
    except CloudRefused as error:
        if asked.push:
            raise
        _tell(f"warning: {base.name} is taken by its tag, which may move, since its digest is not known")
        _tell(f"  {error.message}")
        return BaseReference(uri=public_uri(base), digest=None)
    if digest is None:
        raise UserError(
            f"{region} has no base image {base.name}", "name another one by --base, or another --region"
        )
    return BaseReference(uri=image_uri(base, region, digest), digest=digest)


def _carry_out(around: Surroundings, asked: Asked, builder: str, build: ImageBuild, name: str) -> None:
    """Log in where that is needed, build, and push if that was asked for."""
    with tempfile.TemporaryDirectory(prefix="fastlaunch-build-") as context:
        write_context(build.files, Path(context))
        logins, building, pushing = _commands(builder, asked, build, name, context)
        if logins:
            login = around.aws.registry_login(asked.region)
            for command in logins:
                host = command.argv[-1]
                run_command(
                    login_command(builder, host, user=login.user, password=login.password), lambda line: None
                )
        run_command(building, _tell)
    if pushing:
        around.aws.ensure_repository(asked.region, asked.repository)
    for command in pushing:
        run_command(command, _tell)


def _commands(
    builder: str, asked: Asked, build: ImageBuild, name: str, context: str
) -> tuple[list[Command], Command, list[Command]]:
    """Logins, the build, and the push: what is run, in this order."""
    hosts = [build.reference.host] if build.reference.digest else []
    hosts += [name.partition("/")[0]] if asked.push else []
    logins = [login_command(builder, host, user="AWS") for host in hosts]
    building = build_command(builder, context, tag=name, build_args=build.build_args)
    return logins, building, [push_command(builder, name)] if asked.push else []


def _registry_name(asked: Asked, account: str) -> str:
    """The repository with its registry, or alone for an image that stays here."""
    if not asked.push:
        return asked.repository
    return f"{registry_host(account, asked.region)}/{asked.repository}"


def _wheels(around: Surroundings) -> Path:
    return around.settings.home / "wheels"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"

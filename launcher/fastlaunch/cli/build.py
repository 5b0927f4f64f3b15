"""`fastlaunch build`: build an image with the training code here, and push it to ECR."""

import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from fastlaunch.aws.types import RegistryLogin
from fastlaunch.catalog.container_images import (
    FLAVOURS,
    BaseImage,
    find_base_image,
    image_uri,
    public_uri,
    registry,
    registry_host,
)
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import examples, next_command, profile_option, yes_option
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import size_text, split_names
from fastlaunch.jobs.code_bundle import fetch_wheels, wanted_pins, wheel_folder
from fastlaunch.jobs.image_build import (
    DEFAULT_REPOSITORY,
    BaseReference,
    Command,
    ImageBuild,
    build_command,
    check_repository,
    context_files,
    context_without_wheels,
    has_buildx,
    login_command,
    ort_base,
    ort_context,
    packages_of,
    run_command,
    with_extras,
    write_context,
)
from fastlaunch.lifecycle.world import World

#: The most lines to show of what docker printed before it failed.
_NUM_LINES = 40


@click.command(
    epilog=examples(
        ("what would be done", "fastlaunch build --with transformers --dry-run"),
        ("build and push an image for language models", "fastlaunch build --with transformers --push"),
        ("for SageMaker", "fastlaunch build --flavour sagemaker --push"),
    )
)
@click.option("--base", metavar="TAG", help="Start from this image of AWS's.  [default: the newest]")
@click.option("--push", is_flag=True, help="Upload it to ECR, and create the repository if there is none.")
@click.option(
    "--flavour",
    type=click.Choice(FLAVOURS),
    default="ec2",
    show_default=True,
    help="Take this variant of AWS's image.",
)
@click.option(
    "--with",
    "extras",
    multiple=True,
    metavar="NAME",
    help="Add what AWS's images lack: transformers, lightning, torchao, peft or liger_kernel; repeatable.",
)
@click.option(
    "--ort", is_flag=True, help="Build an image for ORTModule instead, with the old versions that it needs."
)
@click.option(
    "--region", metavar="REGION", help="Use the registries of this region.  [default: the config's]"
)
@click.option(
    "--repository",
    metavar="NAME",
    help="Push to this repository in ECR.  [default: the config's, else fastlaunch]",
)
@click.option("--dry-run", is_flag=True, help="Print the commands and the context; build and ask nothing.")
@yes_option
@profile_option
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

    `submit` needs no such image: it sends the training code along with AWS's image. Build one to add
    packages, or to keep code and environment under one digest. Language models need an image --with
    transformers. The command prints the image's name, with --push by its digest.
    """
    context = app_context()
    region = region or context.own_region()
    registry(region)
    repository = repository or context.settings.region_settings(region).repository or DEFAULT_REPOSITORY
    check_repository(repository)
    if ort and (base or extras or flavour != "ec2"):
        raise UserError("--ort is an image of its own", "leave out --base, --flavour and --with")
    image = None if ort else find_base_image(base, flavour=flavour, today=context.today)
    packages = packages_of([name for given in extras for name in split_names(given)])
    for doubt in image.doubts(context.today) if image else ():
        report_line(as_warning(doubt))
    by_buildx = True
    try:
        by_buildx = has_buildx()
    except UserError as error:
        if not dry_run:
            raise
        report_line(as_warning(f"{error.message}; the commands are those with buildx"))
    made = _image_build(context, image, region, dry_run=dry_run, push=push)
    if packages:
        report_line(f"pip installs in the image, from the network: {', '.join(packages)}")
        dockerfile = with_extras(made.files["Dockerfile"], packages)
        made = replace(made, files={**made.files, "Dockerfile": dockerfile})
    size = (
        f"to upload: about {size_text(made.upload_size)} of its own, and the base's layers, 10 GB or more,"
        " unless an earlier push has brought them to this repository"
    )
    if dry_run:
        lacks_wheels = image is not None and not any(name.startswith("site/") for name in made.files)
        if push and not lacks_wheels:
            report_line(size)
        host = f"{registry_host('<account>', region)}/" if push else ""
        name = f"{host}{repository}:{made.kind}-<content>"
        logins, building, pushing = _commands(made, name, "<context>", by_buildx=by_buildx, push=push)
        listing = _listing(made.files)
        if lacks_wheels:
            listing.append(f"  site/          {' and '.join(map(str, wanted_pins()))}, not fetched yet")
        commands = [f"  {command}" for command in (*logins, building, *pushing)]
        click.echo("\n".join(["context:", *listing, "commands:", *commands]))
        return
    content = f"{made.tag}: {size_text(made.size)} over {made.reference.uri}"
    if not push:
        report_line(f"building {repository}:{content}")
        _carry_out(context, made, f"{repository}:{made.tag}", region, by_buildx=by_buildx)
        next_command("fastlaunch build --push")
        click.echo(f"{repository}:{made.tag}")
        return
    account = context.aws.identity().account
    place = f"{registry_host(account, region)}/{repository}"
    digest = context.aws.image_digest(region, account, repository, made.tag)
    if digest is None:
        report_line(f"building {place}:{content}")
        report_line(size)
        context.confirm("Build and upload?", yes=yes)
        name = f"{place}:{made.tag}"
        _carry_out(context, made, name, region, by_buildx=by_buildx, push_to=repository)
        digest = context.aws.image_digest(region, account, repository, made.tag)
        if digest is None:
            raise UserError(f"{place} has no {made.tag} after the push", "try again")
    else:
        report_line(f"{made.tag} exists already: nothing to build")
    recipe = "te-fp8" if image else "ort --workload gpt2-xsmall"
    next_command(f"fastlaunch submit --image {place}@{digest} --instance p5.48xlarge --recipe {recipe}")
    click.echo(f"{place}@{digest}")


def _image_build(
    context: World, base: BaseImage | None, region: str, *, dry_run: bool, push: bool
) -> ImageBuild:
    """Return the base with the context's files. A dry run asks AWS nothing and fetches no wheels."""
    if base is None:
        return ImageBuild(base=None, reference=ort_base(), files=ort_context(), commit=context.commit)
    wheels = wheel_folder(context.settings)
    if dry_run:
        reference = BaseReference(uri=image_uri(base, region, "<base-digest>"), digest="<base-digest>")
    else:
        with activity("fetching wheels"):
            fetch_wheels(wanted_pins(), wheels, python=base.python)
        reference = _reference(context, base, region, push=push)
    files = context_files(wheels)
    assert files is not None or dry_run, "the wheels have just been fetched"
    return ImageBuild(
        base=base, reference=reference, files=files or context_without_wheels(), commit=context.commit
    )


def _reference(context: World, base: BaseImage, region: str, *, push: bool) -> BaseReference:
    """Return the base image by digest; by tag in AWS's gallery, with a warning, without access to AWS."""
    try:
        digest = context.aws.image_digest(region, registry(region).account, base.repository, base.tag)
    except CloudRefused as error:
        if push:
            raise
        report_line(as_warning(f"{base.name} is taken by its tag, which may move: its digest is not known"))
        report_line(f"  {error.message}")
        return BaseReference(uri=public_uri(base), digest=None)
    if digest is None:
        hint = "name another one by --base, or another --region"
        raise UserError(f"{region} has no base image {base.name}", hint)
    return BaseReference(uri=image_uri(base, region, digest), digest=digest)


def _listing(files: Mapping[str, bytes]) -> list[str]:
    """Return the sizes of the context's top folders and files."""
    sizes: dict[str, list[int]] = {}
    for name, content in sorted(files.items()):
        top, slash, _ = name.partition("/")
        sizes.setdefault(top + slash, []).append(len(content))
    return [
        f"  {top:<14} {size_text(sum(of_top)):>9}" + (f"  {len(of_top)} files" if top.endswith("/") else "")
        for top, of_top in sizes.items()
    ]


def _commands(
    build: ImageBuild,
    name: str,
    folder: str,
    *,
    by_buildx: bool,
    push: bool,
    login: RegistryLogin | None = None,
) -> tuple[list[Command], Command, list[Command]]:
    """Return the commands that log in, build and push, in this order. login: None only to show them."""
    hosts = [build.reference.host] if build.reference.digest else []
    hosts += [name.partition("/")[0]] if push else []
    user, password = (login.user, login.password) if login else ("AWS", None)
    logins = [login_command(host, user=user, password=password) for host in hosts]
    building = build_command(folder, tag=name, build_args=build.build_args, by_buildx=by_buildx)
    return logins, building, [Command(argv=("docker", "push", name))] if push else []


def _carry_out(
    context: World, build: ImageBuild, name: str, region: str, *, by_buildx: bool, push_to: str | None = None
) -> None:
    """Log in where needed, and build. push_to: a repository to push to, which is made if need be."""
    with tempfile.TemporaryDirectory(prefix="fastlaunch-build-") as folder:
        write_context(build.files, Path(folder))
        needs_login = push_to is not None or build.reference.digest is not None
        login = context.aws.registry_login(region) if needs_login else None
        logins, building, pushing = _commands(
            build, name, folder, by_buildx=by_buildx, push=push_to is not None, login=login
        )
        for command in logins:
            run_command(command, lambda line: None)
        _run(building, f"building {name}")
    if push_to is not None:
        context.aws.ensure_repository(region, push_to)
    for command in pushing:
        _run(command, f"pushing {name}")


def _run(command: Command, what: str) -> None:
    """Run a command and show the last line that it printed; if it fails, its last lines."""
    lines: deque[str] = deque(maxlen=_NUM_LINES)
    try:
        with activity(what) as shown:

            def take(line: str) -> None:
                lines.append(line)
                shown.update(line)

            run_command(command, take)
    except UserError:
        report_line("\n".join(lines))
        raise

"""`fastlaunch build`: build an image with the training code here, and push it to ECR."""

import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

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
from fastlaunch.jobs.container_builder import (
    Command,
    build_command,
    find_builder,
    login_command,
    no_builder,
    push_command,
    run_command,
)
from fastlaunch.jobs.image_build import (
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
from fastlaunch.jobs.wheels import fetch_wheels, packages_of, wanted_pins, wheel_folder, with_extras
from fastlaunch.lifecycle.world import World

_OWN_ACCOUNT = "<account>"
#: The most lines to show of what docker printed before it failed.
_NUM_LINES = 40


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What to build, and where to push it."""

    # None for the ORTModule image, whose base is fixed.
    base: BaseImage | None
    # Packages that pip installs in it.
    extras: tuple[str, ...]
    push: bool
    region: str
    # In the account's registry in the region.
    repository: str
    yes: bool


@click.command(
    short_help="Build an image with the training code in it; --push it to ECR.",
    epilog=examples(
        ("what would be done", "fastlaunch build --with transformers --dry-run"),
        ("build and push an image for language models", "fastlaunch build --with transformers --push"),
        ("for SageMaker", "fastlaunch build --flavour sagemaker --push"),
    ),
)
@click.option("--base", metavar="TAG", help="Start from this image of AWS's.  [default: the newest]")
@click.option("--push", is_flag=True, help="Upload it to ECR, into a repository made for it if need be.")
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
    help="Add what AWS's images lack: transformers, lightning or torchao; may be repeated.",
)
@click.option(
    "--ort",
    is_flag=True,
    help="Build an image for ORTModule instead, with the old versions that it works with.",
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

    `submit` needs no such image: it sends the training code along with AWS's own. Build one to add packages,
    or to keep code and environment under one digest. Language models need one --with transformers. Prints
    the image's name, with --push by its digest.
    """
    context = app_context()
    where = region or context.own_region()
    registry(where)
    name = repository or context.settings.region_settings(where).repository or DEFAULT_REPOSITORY
    check_repository(name)
    if ort and (base or extras or flavour != "ec2"):
        raise UserError("--ort is an image of its own", "leave out --base, --flavour and --with")
    options = BuildOptions(
        base=None if ort else find_base_image(base, flavour=flavour, today=context.today),
        extras=packages_of([name for given in extras for name in split_names(given)]),
        push=push,
        region=where,
        repository=name,
        yes=yes,
    )
    for doubt in options.base.doubts(context.today) if options.base else ():
        report_line(as_warning(doubt))
    click.echo(_dry_run(context, options) if dry_run else _build(context, options))


def _with_extras(files: Mapping[str, bytes], options: BuildOptions) -> dict[str, bytes]:
    """Return the context with a Dockerfile in which pip installs the extras."""
    if options.extras:
        report_line(f"pip installs in the image, from the network: {', '.join(options.extras)}")
    return {**files, "Dockerfile": with_extras(files["Dockerfile"], options.extras)}


def _dry_run(context: World, options: BuildOptions) -> str:
    """Return the context's files with sizes, and the commands, with placeholders for what only AWS knows."""
    files = context_files(wheel_folder(context.settings)) if options.base else ort_context()
    builder = find_builder()
    if builder is None:
        report_line(as_warning(f"{no_builder().message}; the commands are docker's with buildx"))
    reference = ort_base()
    if options.base:
        uri = image_uri(options.base, options.region, "<base-digest>")
        reference = BaseReference(uri=uri, digest="<base-digest>")
    build = ImageBuild(
        base=options.base,
        reference=reference,
        files=_with_extras(files or context_without_wheels(), options),
        commit=context.commit,
    )
    name = f"{_registry_name(options, _OWN_ACCOUNT)}:{build.kind}-<content>"
    logins, building, pushing = _commands(builder or "buildx", options, build, name, "<context>")
    if options.push and files is not None:
        report_line(_upload(build))
    lines = ["context:", *_listing(build.files, fetched=files is not None), "commands:"]
    return "\n".join([*lines, *(f"  {command}" for command in (*logins, building, *pushing))])


def _listing(files: Mapping[str, bytes], *, fetched: bool) -> list[str]:
    """Return the sizes of the context's top folders and files."""
    sizes: dict[str, list[int]] = {}
    for name, content in sorted(files.items()):
        top, slash, _ = name.partition("/")
        sizes.setdefault(top + slash, []).append(len(content))
    lines = [
        f"  {top:<14} {size_text(sum(of_top)):>9}" + (f"  {len(of_top)} files" if top.endswith("/") else "")
        for top, of_top in sizes.items()
    ]
    if not fetched:
        lines.append(f"  site/          {' and '.join(map(str, wanted_pins()))}, not fetched yet")
    return lines


def _upload(build: ImageBuild) -> str:
    """Return a sentence on how much will be uploaded."""
    return (
        f"to upload: about {size_text(build.upload_size)} of its own, and the base's layers, 10 GB or more,"
        " unless an earlier push has brought them to this repository"
    )


def _build(context: World, options: BuildOptions) -> str:
    """Build the image; return its name, by digest in ECR or by tag on this machine."""
    builder = find_builder()
    if builder is None:
        raise no_builder()
    if options.base is None:
        reference, files = ort_base(), ort_context()
    else:
        wheels = wheel_folder(context.settings)
        with activity("fetching wheels"):
            fetch_wheels(wanted_pins(), wheels, python=options.base.python)
        whole = context_files(wheels)
        assert whole is not None, "the wheels have just been fetched"
        reference, files = _reference(context, options, options.base), whole
    build = ImageBuild(
        base=options.base, reference=reference, files=_with_extras(files, options), commit=context.commit
    )
    if not options.push:
        name = f"{options.repository}:{build.tag}"
        report_line(f"building {name}: {size_text(build.size)} over {reference.uri}")
        _carry_out(context, options, builder, build, name)
        next_command("fastlaunch build --push")
        return name
    account = context.aws.identity().account
    repository = _registry_name(options, account)
    digest = context.aws.image_digest(options.region, account, options.repository, build.tag)
    if digest is None:
        report_line(f"building {repository}:{build.tag}: {size_text(build.size)} over {reference.uri}")
        report_line(_upload(build))
        context.confirm("Build and upload?", yes=options.yes)
        _carry_out(context, options, builder, build, f"{repository}:{build.tag}")
        digest = context.aws.image_digest(options.region, account, options.repository, build.tag)
        if digest is None:
            raise UserError(f"{repository} has no {build.tag} after the push", "try again")
    else:
        report_line(f"{build.tag} exists already: nothing to build")
    recipe = "te-fp8" if options.base else "ort --workload gpt2-xsmall"
    next_command(f"fastlaunch submit --image {repository}@{digest} --instance p5.48xlarge --recipe {recipe}")
    return f"{repository}@{digest}"


def _reference(context: World, options: BuildOptions, base: BaseImage) -> BaseReference:
    """Return the base image by digest; by tag in AWS's gallery, with a warning, without access to AWS."""
    region = options.region
    try:
        digest = context.aws.image_digest(region, registry(region).account, base.repository, base.tag)
    except CloudRefused as error:
        if options.push:
            raise
        report_line(as_warning(f"{base.name} is taken by its tag, which may move: its digest is not known"))
        report_line(f"  {error.message}")
        return BaseReference(uri=public_uri(base), digest=None)
    if digest is None:
        raise UserError(
            f"{region} has no base image {base.name}", "name another one by --base, or another --region"
        )
    return BaseReference(uri=image_uri(base, region, digest), digest=digest)


def _carry_out(context: World, options: BuildOptions, builder: str, build: ImageBuild, name: str) -> None:
    """Log in where needed, build, and push if asked to."""
    with tempfile.TemporaryDirectory(prefix="fastlaunch-build-") as folder:
        write_context(build.files, Path(folder))
        logins, building, pushing = _commands(builder, options, build, name, folder)
        if logins:
            login = context.aws.registry_login(options.region)
            for command in logins:
                host = command.argv[-1]
                run_command(
                    login_command(builder, host, user=login.user, password=login.password), lambda line: None
                )
        _run(building, f"building {name}")
    if pushing:
        context.aws.ensure_repository(options.region, options.repository)
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


def _commands(
    builder: str, options: BuildOptions, build: ImageBuild, name: str, folder: str
) -> tuple[list[Command], Command, list[Command]]:
    """Return the commands that log in, build and push, in this order."""
    hosts = [build.reference.host] if build.reference.digest else []
    hosts += [name.partition("/")[0]] if options.push else []
    logins = [login_command(builder, host, user="AWS") for host in hosts]
    building = build_command(builder, folder, tag=name, build_args=build.build_args)
    return logins, building, [push_command(builder, name)] if options.push else []


def _registry_name(options: BuildOptions, account: str) -> str:
    """Return the repository with its registry, or without it for an image that is not pushed."""
    if not options.push:
        return options.repository
    return f"{registry_host(account, options.region)}/{options.repository}"

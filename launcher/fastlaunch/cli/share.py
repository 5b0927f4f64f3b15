"""`fastlaunch runs push` and `pull`: runs shared with a team through a folder of S3."""

from typing import TYPE_CHECKING

import click

from fastlaunch.backends.s3_sync import split_uri
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import (
    examples,
    next_command,
    print_json,
    profile_option,
    table_or_json_option,
    with_filters,
)
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import EXIT_DONE, EXIT_JOB_FAILED, BadConfiguration, UserError
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.core.units import counted
from fastlaunch.jobs.option_rules import FOLDER
from fastlaunch.ledger.ledger import IMPORT, Run, open_ledger
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from fastlaunch.lifecycle.sharing import SharedFolder, Transfer

_region_option = click.option(
    "--region", metavar="R", help="Region of the bucket.  [default: yours, or us-east-1]"
)
_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would be done; change nothing, here or there."
)


@click.command(
    short_help="Share runs with a team, through a folder of S3.",
    epilog=examples(
        ("all runs of yours that have ended", "fastlaunch runs push"),
        ("some of them, to another folder", "fastlaunch runs push s3://acme-team/runs 'workload=vit-huge'"),
        ("what would be sent", "fastlaunch runs push --dry-run"),
    ),
    help=with_filters("""Share runs with a team: add them to a folder of S3, for `fastlaunch runs pull`.

    It sends all runs of yours that have ended and measured something, or those that RUN and FILTER pick, and
    nothing twice. The folder is in the config file's bucket, unless s3://... names one; you write only in the
    folder of your name. It sends records, summary, job and price, with your name and account, but not the
    command line, the words after --, where runs lie on this machine, or requests to AWS."""),
)
@click.argument("selectors", nargs=-1, metavar="[s3://...] [RUN|FILTER]...")
@_region_option
@click.option(
    "--with-words", is_flag=True, help="Send the words after -- too. They may hold secrets and private paths."
)
@_dry_run_option
@table_or_json_option
@profile_option
def push(selectors: tuple[str, ...], region: str | None, with_words: bool, dry_run: bool, output: str) -> int:
    from fastlaunch.lifecycle import sharing

    uris = [word for word in selectors if word.startswith("s3://")]
    names = [word for word in selectors if not word.startswith("s3://")]
    if len(uris) > 1:
        raise UserError("runs are pushed to one folder at a time", "give one s3://...")
    context = app_context()
    folder = _shared_folder(context, uris[0] if uris else None, region)
    with open_ledger(context.settings, clock=context.now) as ledger:
        reconcile(ledger, context.backends, context.settings)
        chosen = ledger.select(names)
        if not names:
            chosen = [run for run in chosen if run.summary and run.state.is_final and run.backend != IMPORT]
        identity = context.aws.identity()

        def account_of(run: Run) -> str:
            accounts = [attempt.account for attempt in ledger.attempts_of(run.id) if attempt.account]
            return accounts[-1] if accounts else identity.account

        with activity(f"pushing runs to {folder.uri}") as shown:
            done = sharing.push(
                chosen,
                folder,
                owner=identity.owner_key,
                account=account_of,
                with_words=with_words,
                dry_run=dry_run,
                progress=lambda number, total: shown.update(f"{number} of {total}"),
            )
    _print_transfer(done, "Would push" if dry_run else "Pushed", f"to {folder.uri}", output)
    next_command(f"fastlaunch runs pull {folder.uri}")
    return EXIT_JOB_FAILED if done.left_out else EXIT_DONE


@click.command(
    short_help="Bring home the runs that a team shares.",
    epilog=examples(
        ("from the folder of the config file's bucket", "fastlaunch runs pull"),
        ("from another folder", "fastlaunch runs pull s3://acme-team/runs"),
        ("what would come", "fastlaunch runs pull --dry-run"),
    ),
)
@click.argument("uri", required=False, metavar="[s3://...]")
@_region_option
@_dry_run_option
@table_or_json_option
@profile_option
def pull(uri: str | None, region: str | None, dry_run: bool, output: str) -> int:
    """Bring home the runs that a team shares in a folder of S3, each once; `runs push` puts them there.

    A shared run says whose it is, and is a row of its own in `compare` and `report`. With --with-shared it
    counts there, and in `recommend` and `estimate`, as yours do. It replaces no run that is here: two of one
    name both stay. It cannot be cancelled, resumed or collected here, and no cost of yours includes it.
    """
    from fastlaunch.lifecycle import sharing

    context = app_context()
    folder = _shared_folder(context, uri, region)
    with open_ledger(context.settings) as ledger, activity(f"pulling runs from {folder.uri}") as shown:
        done = sharing.pull(
            ledger,
            folder,
            context.settings.home / "shared",
            owner=context.aws.identity().owner_key,
            dry_run=dry_run,
            progress=lambda number, total: shown.update(f"{number} of {total}"),
        )
    _print_transfer(done, "Would pull" if dry_run else "Pulled", f"from {folder.uri}", output)
    next_command("fastlaunch compare --every-run")
    return EXIT_JOB_FAILED if done.left_out else EXIT_DONE


def _shared_folder(context: World, uri: str | None, region: str | None) -> "SharedFolder":
    """Return the folder of the URI, or of the config file's bucket. Raises UserError if there is none."""
    from fastlaunch.lifecycle.sharing import SharedFolder

    region = region or context.own_region()
    if uri is None:
        region_settings = context.settings.region_settings(region)
        if region_settings.bucket is None:
            raise UserError(f"the config file has no bucket in {region}", "name a folder: s3://BUCKET/FOLDER")
        uri = f"s3://{region_settings.bucket}/{region_settings.prefix}/shared"
    if not FOLDER.fullmatch(uri) or not uri.isprintable():
        raise UserError(f"{uri} is no folder in S3", "give s3://BUCKET/FOLDER")
    bucket, prefix = split_uri(uri)
    try:
        is_there = context.aws.bucket_exists(region, bucket)
    except BadConfiguration as error:
        raise UserError(error.message, "say where the bucket is: --region REGION") from None
    if not is_there:
        raise UserError(f"there is no bucket {bucket}", "create it, or give the URI of another")
    return SharedFolder(
        store=context.aws, region=region, bucket=bucket, prefix=f"{prefix}/" if prefix else ""
    )


def _print_transfer(done: "Transfer", verb: str, where: str, output: str) -> None:
    if output == "json":
        print_json(done.to_json())
        return
    for run_id, why in done.left_out.items():
        report_line(as_warning(f"run {run_id} is left out: {why}"))
    for run_id, other in done.beside.items():
        click.echo(f"run {run_id} has the name of {other}: both stay", err=True)
    num_new, num_updated, num_known = len(done.new), len(done.updated), len(done.known)
    of_these = f" ({num_new} new, {num_updated} updated)" if num_updated else ""
    known = f"; {num_known} {'was' if num_known == 1 else 'were'} there already" if num_known else ""
    click.echo(f"{verb} {counted(num_new + num_updated, 'run')}{of_these} {where}{known}.")

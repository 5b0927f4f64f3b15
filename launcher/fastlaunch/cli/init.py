"""`fastlaunch init`: make an account ready for jobs, and write the config file, each after asking."""

import sys
from typing import Any

import click

from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import USD, examples, next_command, profile_option, yes_option
from fastlaunch.core.errors import EXIT_DONE


@click.command(
    epilog=examples(
        ("asking for everything", "fastlaunch init"),
        (
            "without a question",
            "fastlaunch init --region us-east-1 --bucket acme-training --max-cost 25 --yes",
        ),
    )
)
@click.option(
    "--region", metavar="R", help="Region in which jobs run.  [default: the config's, else the AWS login's]"
)
@click.option(
    "--bucket",
    metavar="NAME",
    help="Name of the bucket to make for runs.  [default: fastlaunch-ACCOUNT-REGION]",
)
@click.option("--vpc", metavar="ID", help="VPC of the machines.  [default: the default one, or the only one]")
@click.option(
    "--subnet",
    "subnets",
    multiple=True,
    metavar="ID",
    help="Subnet of the machines; may be repeated, one per zone.  [default: one in each zone]",
)
@click.option(
    "--max-cost",
    "budget_usd",
    type=USD,
    metavar="USD",
    help="The most that a submission may cost; the config file keeps it.  [default: 25]",
)
@click.option(
    "--stack-name", default="fastlaunch", show_default=True, metavar="NAME", help="Name of the stack."
)
@click.option(
    "--queue",
    metavar="NAME",
    help="Make a queue of AWS Batch for training jobs, too: `submit --queue NAME --share TEAM`.",
)
@click.option(
    "--queue-instances",
    type=click.IntRange(min=1),
    metavar="COUNT",
    help="How many instances jobs of the queue may use at once.  [default: 4]",
)
@click.option(
    "--import-existing",
    is_flag=True,
    help="Let the stack take over your bucket and repository if they exist already.",
)
@click.option("--update", is_flag=True, help="Change an existing stack to this version's template.")
@yes_option
@profile_option
def init(**options: Any) -> int:
    """Make an AWS account ready for jobs, and write the config file; asks first.

    It deploys one CloudFormation stack: bucket, roles and policies, image repository, security group,
    placement groups, a gateway to S3 where there is none, and a queue where one is named. It shows the stack
    before it makes it, and the config file's lines before it writes them. A second run adds only what is
    missing. Without a terminal it needs --yes. `fastlaunch iam print --cloudformation` prints the template
    for an administrator.
    """
    from fastlaunch.api import init as api

    context = app_context(config_may_lack=True)
    can_ask = sys.stdin.isatty() and not options["yes"]
    ready = api.init(context, api.InitOptions(**options), prompt=_prompt if can_ask else None)
    click.echo(f"{ready.region} is ready: stack {ready.stack.name}, config file {ready.config}")
    where = "" if ready.region == context.settings.region else f" --region {ready.region}"
    next_command(f"fastlaunch doctor --instance g6.xlarge{where}")
    return EXIT_DONE


def _prompt(question: str, default: str | None) -> str:
    answer: str = click.prompt(question, default=default, err=True)
    return answer.strip()

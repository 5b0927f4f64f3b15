"""What `live_check.sh` asks of the account, and the look-alike that it starts: `look.py QUESTION ...`.

Ends with 1 and a sentence where the answer is not the one that the script needs.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import Instance
from fastlaunch.core.ownership import MAX_MINUTES_TAG, RUN_TAG
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger

#: The run tag of what others might have started: not in fastlaunch's form.
LOOK_ALIKE = "live-check-look-alike"
_MINUTES = 60


def run(aws: Aws, region: str) -> str:
    """The id of the run that was submitted last."""
    with open_ledger(load_settings()) as ledger:
        return ledger.select(submission=ledger.last_submission())[-1].id


def completed(aws: Aws, region: str, run_id: str) -> str:
    with open_ledger(load_settings()) as ledger:
        found = ledger.get(run_id)
    _check(found.state is RunState.COMPLETED, f"run {run_id} is {found.state}: {found.reason}")
    return f"run {run_id} completed"


def timer(aws: Aws, region: str, run_id: str, wanted: str) -> str:
    """wanted: `there` or `gone`."""
    names = [each.name for each in aws.list_schedules(region) if f"{run_id}-a" in each.name]
    _check(bool(names) is (wanted == "there"), f"run {run_id} has the schedules {names or 'none'}")
    return f"the schedule of run {run_id} is {wanted}"


def tagged(aws: Aws, region: str, run_id: str, tag: str) -> str:
    """tag: KEY=VALUE, which the machine, its volumes and its network interfaces have to have."""
    answer = aws.call(
        "ec2", region, "DescribeInstances", InstanceIds=[each.id for each in _live(aws, run_id)]
    )
    (machine,) = (each for reserved in answer["Reservations"] for each in reserved["Instances"])
    parts = [machine["InstanceId"], *(each["Ebs"]["VolumeId"] for each in machine["BlockDeviceMappings"])]
    parts += [each["NetworkInterfaceId"] for each in machine["NetworkInterfaces"]]
    filters = [{"Name": "resource-id", "Values": parts}]
    tags = aws.call("ec2", region, "DescribeTags", Filters=filters)["Tags"]
    having = {each["ResourceId"] for each in tags if f"{each['Key']}={each['Value']}" == tag}
    _check(len(parts) > 2 and having == set(parts), f"{tag} is on {sorted(having)} and not on all of {parts}")
    return f"{tag} is on {', '.join(parts)}"


def look_alike(aws: Aws, region: str) -> str:
    """Start a t3.nano that has some of fastlaunch's tags; it ends itself after an hour."""
    here = load_settings().region_settings(region)
    tags = [{"Key": RUN_TAG, "Value": LOOK_ALIKE}, {"Key": MAX_MINUTES_TAG, "Value": str(_MINUTES)}]
    kinds = ("instance", "volume", "network-interface")
    place = {"SubnetId": next(iter(here.subnets.values()))} if here.subnets else {}
    request: dict[str, Any] = {
        "InstanceType": "t3.nano",
        "ImageId": aws.parameter(region, here.ami_parameter),
        **{"MinCount": 1, "MaxCount": 1, **place},
        "SecurityGroupIds": list(here.security_groups),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "UserData": f"#!/bin/sh\nshutdown -P +{_MINUTES}\n",
        "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds],
    }
    aws.call("ec2", region, "RunInstances", **request)
    return f"{LOOK_ALIKE} was started"


def listed(aws: Aws, region: str, run_id: str) -> str:
    """stdin: what `reap --dry-run --output json` printed, which has to leave both and to know an owner."""
    machines = {each["run"]: each for each in json.load(sys.stdin)["instances"]}
    for name in (run_id, LOOK_ALIKE):
        _check(name in machines and machines[name]["done"] == "left", f"reap says of {name}: {machines}")
    _check(bool(machines[run_id]["owner"]), f"reap does not say whose {run_id} is")
    return f"reap leaves both; {run_id} is {machines[run_id]['owner']}'s"


def lives(aws: Aws, region: str, name: str) -> str:
    _check(bool(_live(aws, name)), f"nothing of {name} lives")
    return f"{name} lives"


def gone(aws: Aws, region: str, name: str) -> str:
    _check(not _live(aws, name), f"{name} lives: {[each.id for each in _live(aws, name)]}")
    return f"{name} is gone"


def end(aws: Aws, region: str) -> str:
    """End the look-alike."""
    aws.terminate(region, [each.id for each in _live(aws, LOOK_ALIKE)])
    return f"{LOOK_ALIKE} is ended"


def _live(aws: Aws, name: str) -> list[Instance]:
    found = aws.describe_instances(load_settings().region, tags={RUN_TAG: [name]})
    return [each for each in found if each.is_live]


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"error: {otherwise}")


QUESTIONS: dict[str, Callable[..., str]] = {
    each.__name__: each for each in (run, completed, timer, tagged, look_alike, listed, lives, gone, end)
}

if __name__ == "__main__":
    print(QUESTIONS[sys.argv[1]](Aws(), load_settings().region, *sys.argv[2:]))

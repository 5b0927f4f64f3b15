"""An AWS on a port of this machine: moto over HTTP, made to answer like EC2 where moto alone does not.

What moto lacks or gets wrong is put right in `MotoServer._answer` and in `moto_gaps`: client tokens are
idempotent, instances are pending and shutting down for a while, a capacity block is none of spot, and what
moto has not implemented is refused as an error of the service. Every request is kept as it came, since moto
drops interfaces, reservations and placement: assert on `sent()`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BytesIO
from threading import RLock, Thread
from typing import Any

import moto_gaps
import moto_nodes
import moto_stacks
from moto_batch import Queues
from moto_prices import PriceLists
from moto_training_jobs import TrainingJobs
from sent_request import SentRequest, read_request

from fastlaunch.core.settings import DEFAULT_AMI_PARAMETER, RegionSettings

ACCOUNT = "123456789012"

#: EC2's own numbers. docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceState.html
STATE_CODES = {
    "pending": 0,
    "running": 16,
    "shutting-down": 32,
    "terminated": 48,
    "stopping": 64,
    "stopped": 80,
}

#: EC2 answers these with a server's error, which clients repeat unasked. docs.aws.amazon.com/AWSEC2/latest/
#: APIReference/errors-overview.html, "Server error codes".
SERVER_ERRORS = {
    "InsufficientInstanceCapacity": 500,
    "InsufficientReservedInstanceCapacity": 500,
    "InsufficientCapacity": 500,
    "InternalError": 500,
    "InternalFailure": 500,
    "RequestLimitExceeded": 503,
    "ServiceUnavailable": 503,
    "Unavailable": 503,
    "SlowDown": 503,
}

Parameters = Mapping[str, Any]


@dataclass(kw_only=True)
class Refusal:
    """Answer an action with an error: `times` times (None: always), of the requests that `where` picks."""

    action: str
    code: str
    message: str
    status: int
    times: int | None
    where: Callable[[SentRequest], bool]


class MotoServer:
    """A started server; one for a test session, `reset` for every test. `url` is AWS_ENDPOINT_URL.

    Keyed by what a test wants to be so, and empty after `reset`: console (text by instance id), quotas and
    default_quotas (by region and code), spot_prices (USD by region, type, zone), images (digest by region,
    account, repository, tag), denied (actions that iam:SimulatePrincipalPolicy refuses).
    shutting_down_describes: how often an instance is seen so before it has ended, 1 or 0.
    when_launched, when_terminated: called with the instance's region and id, after the answer was made.
    training_jobs: SageMaker's, see `moto_training_jobs`; queues: AWS Batch's, see `moto_batch`. blocks:
    capacity blocks by id, and in_blocks: the
    block of an instance, by its id; see `moto_nodes`.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        moto_gaps.mend_moto()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = RLock()
        self._servers: list[Any] = []
        self._clear()
        self.url = self.listen("127.0.0.1")

    def _clear(self) -> None:
        self._sent: list[SentRequest] = []
        self._refusals: list[Refusal] = []
        self._furnished: set[str] = set()
        self._tokens: dict[tuple[str, str], tuple[Parameters, bytes, list[str]]] = {}
        # Pending or shutting down until the next look.
        self._passing: set[str] = set()
        moto_stacks.clear()
        self.console: dict[str, str] = {}
        self.training_jobs = TrainingJobs()
        self.queues = Queues(self.training_jobs)
        self.quotas: dict[tuple[str, str], float] = {}
        self.default_quotas: dict[tuple[str, str], float] = {}
        self.price_lists = PriceLists()
        self.spot_prices: dict[tuple[str, str, str], float] = {}
        self.images: dict[tuple[str, str, str, str], str] = {}
        self.denied: set[str] = set()
        self.placement_groups: dict[tuple[str, str], str] = {}
        self.blocks: dict[str, moto_nodes.Block] = {}
        self.in_blocks: dict[str, str] = {}
        self.shutting_down_describes = 1
        self.when_launched: list[Callable[[str, str], None]] = []
        self.when_terminated: list[Callable[[str, str], None]] = []

    # The server itself

    def listen(self, host: str) -> str:
        """URL under which the server answers at `host` too, at a port of its choice, until `close`.

        0.0.0.0 for every address that this machine has, such as a veth pair's.
        """
        from moto.server import MotoRequestHandler
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log(self, type: str, message: str, *args: object) -> None:
                pass

        server = make_server(host, 0, self, threaded=True, request_handler=Quiet)
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        self._servers.append((server, thread))
        return f"http://{host}:{server.server_address[1]}"

    def close(self) -> None:
        """Stop answering."""
        for server, thread in self._servers:
            server.shutdown()
            thread.join()
            server.server_close()
        self._servers.clear()

    def reset(self) -> None:
        """Forget everything, as if the account were new."""
        from moto.core.base_backend import BackendDict
        from moto.core.model_instances import reset_model_data

        with self._lock:
            BackendDict.reset()
            reset_model_data()
            self._clear()

    # What tests arrange

    def set_up_region(
        self, region: str, *, bucket: str | None = None, profile: str = "fastlaunch-node"
    ) -> RegionSettings:
        """Settings of a region with all that EC2 takes: bucket, profile, timer's role, group, subnets."""
        iam, s3, ec2 = backend("iam", "aws"), backend("s3", "aws"), backend("ec2", region)
        name = bucket or f"runs-{region}"
        s3.create_bucket(name, region)
        if profile not in {known.name for known in iam.instance_profiles.values()}:
            iam.create_role(profile, "{}", "/", None, "", [], None)
            iam.create_instance_profile(profile, "/", [profile])
        if "fastlaunch-scheduler" not in {role.name for role in iam.roles.values()}:
            trust = {"Principal": {"Service": "scheduler.amazonaws.com"}, "Action": "sts:AssumeRole"}
            policy = json.dumps({"Statement": [{"Effect": "Allow", **trust}]})
            iam.create_role("fastlaunch-scheduler", policy, "/", None, "", [], None)
        role = next(role for role in iam.roles.values() if role.name == "fastlaunch-scheduler")
        self._furnish(region)
        subnets = {zone: subnet.id for zone, subnet in sorted(ec2.get_default_subnets().items())}
        return RegionSettings(
            bucket=name,
            instance_profile=profile,
            security_groups=(ec2.get_default_security_group().id,),
            subnets=subnets,
            scheduler_role=role.arn,
        )

    def refuse(
        self,
        action: str,
        code: str,
        message: str = "refused by the test",
        *,
        status: int | None = None,
        times: int | None = None,
        where: Callable[[SentRequest], bool] | Mapping[str, str] | None = None,
    ) -> Refusal:
        """Answer `action` with an error of this code, `times` times, or always.

        where: which requests: parameters that they have (`{"SubnetId": ...}`), or a function of the request.
        """
        chosen = where if callable(where) else _has_parameters(where or {})
        refusal = Refusal(
            action=action,
            code=code,
            message=message,
            status=status or SERVER_ERRORS.get(code, 400),
            times=times,
            where=chosen,
        )
        self._refusals.append(refusal)
        return refusal

    def allow(self, refusal: Refusal) -> None:
        """Refuse so no longer."""
        self._refusals.remove(refusal)

    def instance(self, instance_id: str) -> Any:
        """moto's own object of an instance, of whatever region."""
        return next(found for _, found in self._instances() if found.id == instance_id)

    def instances(self, *states: str) -> list[Any]:
        """moto's own objects of the instances of all regions that are in one of the states (none: all)."""
        return [found for _, found in self._instances() if not states or found.state in states]

    def set_instance(
        self,
        instance_id: str,
        *,
        state: str | None = None,
        state_reason: str | None = None,
        transition_reason: str | None = None,
        launch_time: datetime | None = None,
    ) -> None:
        """Make an instance so. state_reason: `Server.SpotInstanceTermination: Spot instance termination`."""
        from moto.ec2.models.instances import InstanceState, StateReason

        with self._lock:
            instance = self.instance(instance_id)
            if state is not None:
                instance._state = InstanceState(state, STATE_CODES[state])
                self._passing.discard(instance_id)
            if state_reason is not None:
                instance.state_reason = StateReason(state_reason, state_reason.partition(":")[0])
            if transition_reason is not None:
                instance._reason = transition_reason
            if launch_time is not None:
                instance.launch_time = launch_time.astimezone(UTC).replace(tzinfo=None)

    def forget(self, instance_id: str) -> None:
        """Know nothing of an instance any more, as EC2 does an hour after its end."""
        with self._lock:
            for ec2 in self._regions().values():
                for reservation in list(ec2.reservations.values()):
                    reservation.instances = [i for i in reservation.instances if i.id != instance_id]
                    if not reservation.instances:
                        del ec2.reservations[reservation.id]

    def zone_of(self, region: str, subnet: str) -> str | None:
        """The zone of a subnet, None if there is no such subnet."""
        found = backend("ec2", region).subnets
        zones = {id: one.availability_zone for by_id in found.values() for id, one in by_id.items()}
        return zones.get(subnet)

    # What tests ask

    def sent(self, action: str | None = None) -> list[SentRequest]:
        """Requests that came in, oldest first; of one action, such as `RunInstances`."""
        with self._lock:
            return [request for request in self._sent if action in (None, request.action)]

    def counts(self) -> Counter[str]:
        """How many requests came in, by action."""
        return Counter(request.action for request in self.sent())

    # Answering

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = read_request(environ)
        status, headers, body = self._answer(request, environ)
        with self._lock:
            self._sent.append(replace(request, status=status))
        # The body is here in one piece; a HEAD's length is that of what it does not send.
        told = [(key, value) for key, value in headers if key.lower() not in ("content-length", "connection")]
        length = next((value for key, value in headers if key.lower() == "content-length"), None)
        kept = length if request.method == "HEAD" and length else str(len(body))
        start_response(f"{status} -", [*told, ("Content-Length", kept)])
        return [body]

    def _answer(self, request: SentRequest, environ: dict[str, Any]) -> "Answer":
        with self._lock:
            for refusal in self._refusals:
                if refusal.action == request.action and refusal.times != 0 and refusal.where(request):
                    refusal.times = None if refusal.times is None else refusal.times - 1
                    return moto_gaps.error(request, refusal.code, refusal.message, refusal.status)
            if request.service in ("ec2", "ssm"):
                self._furnish(request.region)
            answer = moto_gaps.answer(self, request)
            if answer is None and request.service == "batch":
                answer = self.queues.answer(request)
            if answer is None and request.service == "sagemaker":
                answer = self.training_jobs.answer(request)
            if answer is not None:
                return answer
            if request.service == "ec2" and request.action in _EC2_ACTIONS:
                return _EC2_ACTIONS[request.action](self, request, environ)
        return self._ask_moto(request, environ)

    def _ask_moto(self, request: SentRequest, environ: dict[str, Any]) -> "Answer":
        told: list[Any] = []
        body = BytesIO()

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
            told[:] = [int(status.split()[0]), headers]
            return body.write

        try:
            answer = self._moto(environ, start_response)
        except NotImplementedError:
            return moto_gaps.error(request, "NotInMoto", f"moto does not do {request.action}", 400)
        try:
            for part in answer:
                body.write(part)
        finally:
            if hasattr(answer, "close"):
                answer.close()
        status, headers = told
        return status, headers, body.getvalue()

    def _run_instances(self, request: SentRequest, environ: dict[str, Any]) -> "Answer":
        given = dict(request.parameters)
        token = given.pop("ClientToken", "")
        if given.get("DryRun") == "true":
            return self._ask_moto(request, environ)
        key = (request.region, token)
        if token and key in self._tokens:
            before, answer, ids = self._tokens[key]
            if before != given:
                message = (
                    "Arguments on this idempotent request are inconsistent with arguments used in previous"
                )
                return moto_gaps.error(request, "IdempotentParameterMismatch", f"{message} request(s)", 400)
            live = [i for i in self.instances("pending", "running", "stopping", "stopped") if i.id in ids]
            if not live:
                message = "The request to launch an instance uses the same client token as a previous request"
                full = f"{message} for which the instance has been terminated."
                return moto_gaps.error(request, "IdempotentInstanceTerminated", full, 400)
            return 200, [("Content-Type", "text/xml;charset=UTF-8")], answer
        if refused := moto_nodes.refusal(self, request):
            return moto_gaps.error(request, *refused, SERVER_ERRORS.get(refused[0], 400))
        status, headers, body = self._ask_moto(request, environ)
        if status != 200:
            return status, headers, body
        ids = _ids(body)
        moto_nodes.note(self, request, ids)
        for instance_id in ids:
            self.set_instance(instance_id, state="pending")
            self._passing.add(instance_id)
            # moto tags instances and volumes only.
            interfaces = [nic.id for nic in self.instance(instance_id).nics.values()]
            backend("ec2", request.region).create_tags(interfaces, request.tags("network-interface"))
            if given.get("InstanceMarketOptions.MarketType") == "capacity-block":
                self.instance(instance_id).lifecycle = "capacity-block"
        if token:
            self._tokens[key] = given, body, ids
        for instance_id in ids:
            for call in self.when_launched:
                call(request.region, instance_id)
        return status, headers, body

    def _describe_instances(self, request: SentRequest, environ: dict[str, Any]) -> "Answer":
        status, headers, body = self._ask_moto(request, environ)
        following = {"pending": "running", "shutting-down": "terminated"}
        for instance_id in set(_ids(body)) & self._passing:
            # Another request, at the same time, may have seen it pass.
            if state := following.get(self.instance(instance_id).state):
                self.set_instance(instance_id, state=state)
        return status, headers, body

    def _terminate_instances(self, request: SentRequest, environ: dict[str, Any]) -> "Answer":
        before = {instance.id for instance in self.instances("shutting-down", "terminated")}
        reasons = {i: (self.instance(i).state_reason, self.instance(i)._reason) for i in before}
        status, headers, body = self._ask_moto(request, environ)
        for instance_id in _ids(body) if status == 200 else ():
            if instance_id in before:
                # moto says that the user did it, whoever it was.
                self.instance(instance_id).state_reason, self.instance(instance_id)._reason = reasons[
                    instance_id
                ]
                continue
            if self.shutting_down_describes:
                self.set_instance(instance_id, state="shutting-down")
                self._passing.add(instance_id)
            for call in self.when_terminated:
                call(request.region, instance_id)
        return status, headers, body

    # moto's inside

    def _regions(self) -> dict[str, Any]:
        return {name: backend("ec2", name) for name in sorted(self._furnished)}

    def _instances(self) -> list[tuple[str, Any]]:
        return [(name, found) for name, ec2 in self._regions().items() for found in ec2.all_instances()]

    def _furnish(self, region: str) -> None:
        """The machine image of jobs, and the parameter that names it, as AWS keeps them in every region."""
        if region and region not in self._furnished:
            self._furnished.add(region)
            moto_gaps.add_machine_image(region, DEFAULT_AMI_PARAMETER)


Answer = tuple[int, list[tuple[str, str]], bytes]

_EC2_ACTIONS = {
    "RunInstances": MotoServer._run_instances,
    "DescribeInstances": MotoServer._describe_instances,
    "TerminateInstances": MotoServer._terminate_instances,
}


def backend(service: str, region: str) -> Any:
    """moto's own state of a service; region `aws` for iam and s3."""
    from moto.backends import get_backend

    return get_backend(service)[ACCOUNT][region]


def _has_parameters(wanted: Mapping[str, str]) -> Callable[[SentRequest], bool]:
    return lambda request: all(request.parameters.get(name) == value for name, value in wanted.items())


def _ids(body: bytes) -> list[str]:
    return list(dict.fromkeys(re.findall(r"<instanceId>(i-[0-9a-f]+)</instanceId>", body.decode())))

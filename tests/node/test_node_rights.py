"""Every request of a machine, from boot to its end, against the policy of its role. Slow: seconds."""

import pytest
from moto_server import ACCOUNT
from node_scene import BUCKET, FIRST, RUNS, Scene, node_program, node_run
from policy_check import Ask, allows
from sent_request import SentRequest
from simulated_instance import cannot_simulate

from fastlaunch.account.policies import names_by_hand, policy

REASON = cannot_simulate()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
#: What a request to S3 needs, where that is not its own name. docs.aws.amazon.com/AmazonS3, "Required
#: permissions for Amazon S3 API operations".
RIGHTS = {
    "HeadObject": "GetObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "ListObjects": "ListBucket",
    "ListObjectsV2": "ListBucket",
}


def ask_of(request: SentRequest) -> Ask:
    """What the request asks IAM for."""
    if request.service != "s3":
        return Ask(action=f"{request.service}:{request.action}")
    right = RIGHTS.get(request.action, request.action)
    bucket = f"arn:aws:s3:::{request.parameters['Bucket']}"
    if right == "ListBucket":
        context = {"s3:prefix": request.parameters["prefix"]}
        return Ask(action="s3:ListBucket", resource=bucket, context=context)
    return Ask(action=f"s3:{right}", resource=f"{bucket}/{request.parameters['Key']}")


def test_a_machine_asks_for_nothing_that_its_role_may_not(scene: Scene) -> None:
    """A second attempt, which goes on from a checkpoint and leaves others."""
    scene.put(f"{RUNS}/{FIRST}/checkpoints/step-00000002.pt", b"a checkpoint")
    program = node_program(node_run(FIRST, steps=6, checkpoint_every=2), attempt=2)
    assert scene.launch(program).wait() == "shutdown"
    sent = [one for one in scene.moto.sent() if one.headers.get("user-agent", "").startswith("aws-cli")]
    asks = [ask_of(one) for one in sent]
    assert {ask.action for ask in asks} >= {
        *("s3:PutObject", "s3:GetObject", "s3:ListBucket", "ecr:GetAuthorizationToken")
    }
    held = [policy("node", names_by_hand(account=ACCOUNT, bucket=BUCKET))]
    assert [ask for ask in asks if not allows(held, ask)] == []

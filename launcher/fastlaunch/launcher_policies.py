"""What those who type `fastlaunch` may do in an account: three policies, the first for everybody. Pure.

The others are for `--backend sagemaker` and for `fastlaunch build`. A managed policy holds 6,144 characters.
"""

from fastlaunch.account_statements import JOB_LOGS, AccountNames, Statement, bucket_key, pass_role, pull
from fastlaunch.aws.scheduler import SCHEDULE_PREFIX

#: Without these nothing is started, since nothing would end it.
_REQUEST_TAGS = {
    "Null": {"aws:RequestTag/fastlaunch:run": "false", "aws:RequestTag/fastlaunch:max-minutes": "false"}
}

_LOOK = (
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRegions",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcEndpoints",
    "ec2:DescribeVpcs",
    "sagemaker:ListTrainingJobs",
    "scheduler:ListSchedules",
    "servicequotas:GetAWSDefaultServiceQuota",
    "servicequotas:GetServiceQuota",
    "servicequotas:ListAWSDefaultServiceQuotas",
    "servicequotas:ListServiceQuotas",
)


def launcher(names: AccountNames) -> tuple[Statement, ...]:
    """What those may do who type `fastlaunch`: machines of EC2, and looking at and ending all that runs."""
    return (
        Statement(
            sid="StartTagged",
            why="machines are started with the tags by which they are found and ended",
            actions=("ec2:RunInstances",),
            resources=(names.arn("ec2", "instance/*"), names.arn("ec2", "volume/*")),
            condition=_REQUEST_TAGS,
        ),
        Statement(
            sid="StartWith",
            why="what a machine is started from, and where",
            actions=("ec2:RunInstances",),
            resources=(
                f"arn:{names.partition}:ec2:*::image/*",
                f"arn:{names.partition}:ec2:*::snapshot/*",
                *(
                    names.arn("ec2", f"{kind}/*")
                    for kind in (
                        "capacity-reservation",
                        "network-interface",
                        "placement-group",
                        "security-group",
                        "spot-instances-request",
                        "subnet",
                    )
                ),
            ),
        ),
        Statement(
            sid="TagWhatIsStarted",
            why="tags are given while a machine is started, and never to what is there",
            actions=("ec2:CreateTags",),
            resources=(names.arn("ec2", "instance/*"), names.arn("ec2", "volume/*")),
            condition={"StringEquals": {"ec2:CreateAction": "RunInstances"}},
        ),
        Statement(
            sid="EndTagged",
            why="only fastlaunch's machines are ended and looked into",
            actions=("ec2:GetConsoleOutput", "ec2:TerminateInstances"),
            resources=(names.arn("ec2", "instance/*"),),
            condition={"Null": {"aws:ResourceTag/fastlaunch:run": "false"}},
        ),
        pass_role("PassTheMachinesRole", "a machine gets its role", names.node_role, "ec2"),
        Statement(
            sid="Timers",
            why="--detach makes a timer in the account; status, cancel and reap take it away",
            actions=("scheduler:CreateSchedule", "scheduler:DeleteSchedule"),
            resources=(names.arn("scheduler", f"schedule/default/{SCHEDULE_PREFIX}*"),),
        ),
        pass_role("PassTheTimersRole", "a timer gets its role", names.scheduler_role, "scheduler"),
        Statement(
            sid="Jobs",
            why="training jobs are looked at, by everybody who reaps",
            actions=("sagemaker:DescribeTrainingJob", "sagemaker:ListTags"),
            resources=(names.arn("sagemaker", "training-job/*"),),
        ),
        Statement(
            sid="StopTaggedJobs",
            why="only fastlaunch's training jobs are stopped, and their warm pools ended",
            actions=("sagemaker:StopTrainingJob", "sagemaker:UpdateTrainingJob"),
            resources=(names.arn("sagemaker", "training-job/*"),),
            condition={"Null": {"aws:ResourceTag/fastlaunch:run": "false"}},
        ),
        Statement(
            sid="AskIam",
            why="doctor asks whether roles may be passed, and what they may do",
            actions=("iam:GetInstanceProfile", "iam:GetRole", "iam:SimulatePrincipalPolicy"),
            resources=("*",),
        ),
        Statement(
            sid="Look",
            why="what is offered, free, allowed and running; it changes nothing",
            actions=_LOOK,
            resources=("*",),
        ),
        Statement(
            sid="MachineImage",
            why="AWS's newest machine image with the driver",
            actions=("ssm:GetParameter",),
            resources=(f"arn:{names.partition}:ssm:*::parameter/aws/service/deeplearning/*",),
        ),
        Statement(
            sid="ContainerImage",
            why="the digest of the image that a run will use",
            actions=("ecr:BatchGetImage",),
            resources=names.all_images,
        ),
        Statement(
            sid="Bucket",
            why="what runs have uploaded is found, and that the bucket is there",
            actions=("s3:ListBucket",),
            resources=(names.bucket_arn,),
        ),
        Statement(
            sid="Objects",
            why="the code goes up, records and logs come down",
            actions=("s3:GetObject", "s3:PutObject"),
            resources=(names.objects("*"),),
        ),
        *bucket_key(names),
        *_volume_key(names),
    )


def launcher_sagemaker(names: AccountNames) -> tuple[Statement, ...]:
    """What `--backend sagemaker` takes besides: starting training jobs, and reading what they print."""
    jobs = (names.arn("sagemaker", "training-job/*"),)
    return (
        Statement(
            sid="StartTaggedJobs",
            why="training jobs are started with the tags by which they are found and stopped",
            actions=("sagemaker:CreateTrainingJob",),
            resources=jobs,
            condition=_REQUEST_TAGS,
        ),
        Statement(
            sid="UseTrainingPlan",
            why="--training-plan runs jobs in what was bought before",
            actions=("sagemaker:CreateTrainingJob",),
            resources=(
                names.arn("sagemaker", "reserved-capacity/*"),
                names.arn("sagemaker", "training-plan/*"),
            ),
        ),
        Statement(
            sid="TagJobs",
            why="tags are given while a job is started, and never to what is there",
            actions=("sagemaker:AddTags",),
            resources=jobs,
            condition={"StringEquals": {"sagemaker:TaggingAction": "CreateTrainingJob"}},
        ),
        pass_role("PassTheJobsRole", "a training job gets its role", names.training_role, "sagemaker"),
        Statement(
            sid="ReadJobLogs",
            why="what a job that failed early had printed",
            actions=("logs:DescribeLogStreams", "logs:GetLogEvents"),
            resources=(names.arn("logs", JOB_LOGS), names.arn("logs", f"{JOB_LOGS}:*")),
        ),
    )


def launcher_build(names: AccountNames) -> tuple[Statement, ...]:
    """What `fastlaunch build` takes besides: pulling AWS's image, and pushing into the own repository."""
    return (
        *pull(names),
        Statement(
            sid="OwnImages",
            why="docker pushes the image, into a repository that is made once",
            actions=(
                "ecr:CompleteLayerUpload",
                "ecr:CreateRepository",
                "ecr:DescribeRepositories",
                "ecr:InitiateLayerUpload",
                "ecr:PutImage",
                "ecr:UploadLayerPart",
            ),
            resources=(names.own_images,),
        ),
    )


def _volume_key(names: AccountNames) -> tuple[Statement, ...]:
    if names.kms_key is None:
        return ()
    return (
        Statement(
            sid="VolumeKey",
            why="EC2 encrypts the machine's volume with the key, where it is the region's default",
            actions=("kms:DescribeKey", "kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncrypt*"),
            resources=(names.kms_key,),
        ),
        Statement(
            sid="VolumeKeyGrant",
            why="EC2 gets the use of the key for that, and nobody else",
            actions=("kms:CreateGrant",),
            resources=(names.kms_key,),
            condition={"Bool": {"kms:GrantIsForAWSResource": "true"}},
        ),
    )

"""Names and times that requests, the ledger, IAM policies and `reap` agree on."""

#: The form of the ids that the ledger gives to runs: `20261121-090312-k3f9`.
RUN_ID = r"[0-9]{8}-[0-9]{6}-[a-z0-9]{4}"

#: Tags of machines and jobs. What lacks one of them, or has it in another form, is ended by nothing here.
RUN_TAG = "fastlaunch:run"
ATTEMPT_TAG = "fastlaunch:attempt"
MAX_MINUTES_TAG = "fastlaunch:max-minutes"
#: URI of what the attempt uploads.
OUTPUT_TAG = "fastlaunch:output"

#: Prefix of every schedule's name.
SCHEDULE_PREFIX = "fastlaunch-"

#: Minutes that may be billed on top of the time limit. EC2: before booting, and from shutdown to terminated.
#: SageMaker: stopping, and uploading what the job wrote.
MARGIN_MINUTES = 10
#: The shortest limit that is worth a machine: it boots, pulls the image, and keeps time to save and upload.
MIN_MINUTES = 15

"""Names and times that requests, the ledger, IAM policies and `reap` agree on."""

#: Tags of machines and jobs. Without the first three, `reap` ends nothing.
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

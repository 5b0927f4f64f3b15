#!/usr/bin/env bash
# For somebody with an AWS account, set up by docs/setup.md: what no test here can tell. `make live-check`.
#
# It starts two small machines of EC2 and one of SageMaker, each for minutes: every command says before what it
# can cost at most, refuses more than $LIMIT_USD, and asks. And it starts, unasked, a t3.nano for minutes, which
# costs less than a cent. Whatever happens, it ends what it started. OTHER_PROFILE: a login to another account.
# Besides the policies for users it needs ec2:DescribeTags, and one made with --only-type has to allow t3.nano.
set -euo pipefail
cd "$(dirname "$0")/../.."

LIMIT_USD=${LIMIT_USD:-2}
PYTHON=${PYTHON:-python3}
FASTLAUNCH=${FASTLAUNCH:-fastlaunch}
SMALL=(--workload vit-tiny --recipe bf16 --steps 200 --max-hours 30min --max-cost "$LIMIT_USD")
TAG=live-check=yes
started=

step() { printf '\n==> %s\n' "$*" >&2; }
look() { "$PYTHON" tests/live/look.py "$@"; }
end_all() {
  local run
  step 'ending what was started'
  look end || echo 'look by hand for a t3.nano with the tag fastlaunch:run=live-check-look-alike' >&2
  for run in $started; do "$FASTLAUNCH" reap --run "$run" --yes || echo "look by hand for run $run" >&2; done
}
submit_detached() { # sets $run
  "$FASTLAUNCH" submit --instance g5.xlarge "${SMALL[@]}" --detach --tag "$TAG"
  run=$(look run)
  started="$started $run"
  look timer "$run" there
}

step 'what a job would meet, on EC2 and on SageMaker'
"$FASTLAUNCH" doctor --instance g5.xlarge
"$FASTLAUNCH" doctor --instance ml.g5.xlarge

step 'whether EC2 takes the plans of several nodes with EFA (nothing is started)'
"$PYTHON" tests/live/dry_run_plans.py

trap end_all EXIT
step 'one run on g5.xlarge that nobody follows: its timer and its tags'
submit_detached
look tagged "$run" "$TAG"

step 'another account judges nothing'
if [ -n "${OTHER_PROFILE-}" ]; then
  "$FASTLAUNCH" status "$run" --profile "$OTHER_PROFILE" 2>&1 | tee /dev/stderr |
    grep -E 'in account [0-9]{12} .* logged in to [0-9]{12}' >/dev/null
else
  echo 'skipped: OTHER_PROFILE names no login to another account' >&2
fi

step 'its end, after which the timer is gone'
"$FASTLAUNCH" watch "$run"
look completed "$run"
look timer "$run" gone

step 'the same on ml.g5.xlarge, followed'
"$FASTLAUNCH" submit --instance ml.g5.xlarge "${SMALL[@]}"

step 'a second run, and a t3.nano with some of its tags (less than a cent): reap leaves both'
submit_detached
look look_alike
"$FASTLAUNCH" reap --dry-run --output json | look listed "$run"

step 'the end of the second run by its tags alone'
"$FASTLAUNCH" reap --run "$run" --yes
look gone "$run"
look timer "$run" gone

step 'what they cost, and that nothing is left but the t3.nano'
"$FASTLAUNCH" status
"$FASTLAUNCH" reap
look lives live-check-look-alike

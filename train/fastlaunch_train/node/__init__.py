"""The program of a SageMaker training job's container, on every host. No torch, Python from 3.10.

It does the job's runs one after another, each through `run_train.sh`, and leaves everything that is wanted of
them below /opt/ml/checkpoints, which SageMaker copies to S3 while the job runs:

    <token>/boot.json                            of the first host; node-<k>/boot.json of the others
    <token>/node-<k>/log.txt.<offset>            what this program prints
    <token>/node-<k>/<run id>/<file>.<offset>    log.txt, records, tracebacks and what NCCL says
    <token>/node-<k>/<run id>/ended.json         once the run needs no other go
    <token>/node-<k>/status.json                 the last word
    <run id>/checkpoints/step-<8 digits>.pt      of the model

Files that grow are there as immutable segments, named by the byte at which they start, since what SageMaker
copies must never change. After a spot interruption SageMaker brings all of it back and starts this program
again: nothing is truncated, logs go on at the next byte, records get the next attempt number, completed runs
are not done again, and the others go on from their newest checkpoint.

`request` reads what is asked for, `shelf` puts files there whole, `segments` cuts, `shipping` does both while
a run goes on, `training` is one run's processes, `hosts` keeps several hosts in step, `causes` finds why one
failed, `verdicts` what became of it, `words` says so, and `job` joins them.
"""

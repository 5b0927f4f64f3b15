"""Where plans run (local, ec2, sagemaker): the request, start, observe, collect, stop.

May import core, catalog, jobs, aws and measure, and not the ledger.
"""

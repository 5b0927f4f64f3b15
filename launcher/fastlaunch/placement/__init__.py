"""Where a job may run: candidates -> `Site`s, the cost ceiling, checks before a submission (a new one
is a line of `checks.py`). May import core, catalog, jobs, aws and backends.
"""

"""Where a job may run: candidates -> `Site`s, preflight checks, the cost ceiling.

May import core, catalog, jobs, aws and backends.
"""

"""What ran: runs and attempts in SQLite, selectors.

Written by runs, and by cli for runs import, runs rm and collect. May import core, catalog, jobs and measure.
"""

"""A rank as a process: failures and exit codes, interrupts, launch environment, threads.

May import records and recipes.
"""

"""The training in plain sight: fetch, step, record; when a block closes: check, evaluate, save.

May import the rooms from records to checks.
"""

"""The life of a submission: place, follow, finish, resume, cancel, reconcile, reap, collect.

May import every room but api and cli.
"""

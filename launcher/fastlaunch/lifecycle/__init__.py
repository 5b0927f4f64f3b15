"""The life of a submission: place, follow, finish, resume, cancel, reconcile, reap, collect.

May import every room above it: core to placement.
"""

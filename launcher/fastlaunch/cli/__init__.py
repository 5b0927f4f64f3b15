"""The `fastlaunch` command: parse, call, print. A file per command group, imported when it is called.

May import every room.
"""

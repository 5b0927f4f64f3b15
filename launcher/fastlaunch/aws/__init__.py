"""Typed boto3 calls, a file per topic, which client.py joins as `Aws`, and what their errors mean.

May import core, and is the only room that imports boto3.
"""

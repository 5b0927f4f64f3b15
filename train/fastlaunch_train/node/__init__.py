"""The agent of a machine: does its runs, uploads what they leave, says the last word; for EC2 and SageMaker.

Standard library alone, Python from 3.9. Imports nothing of fastlaunch_train but itself.
"""

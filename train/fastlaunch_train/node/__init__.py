"""The agent on a machine of EC2 or SageMaker: it does the runs, uploads their files and says the last word.

It needs Python 3.9 and the standard library alone, and imports nothing else of fastlaunch_train.
"""

"""The exit codes of the training, by which the machine's program tells what became of a run. No torch."""

#: By the status in the record.
EXIT_CODES = {"completed": 0, "interrupted": 130, "out_of_memory": 12, "nan_loss": 33, "failed": 1}
EXIT_BAD_REQUEST = 2
EXIT_DISK_FULL = 28
#: The machines cannot do what was asked for, which no second attempt changes; EX_CONFIG of sysexits.h.
EXIT_CONFIGURATION = 78

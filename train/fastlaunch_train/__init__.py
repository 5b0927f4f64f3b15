"""The training half of fastlaunch: runs on the machine that trains, and knows nothing of AWS.

`recipes`, `records` and the registry in `workloads` import no torch, because the launcher reads them.
"""

__version__ = "0.1.0"

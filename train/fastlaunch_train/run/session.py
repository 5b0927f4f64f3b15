"""`Session`: the facts known so far about a run, for its record's header and end."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.process.device import memory_gib
from fastlaunch_train.process.failures import TracebackFile
from fastlaunch_train.process.launch import LaunchSettings, launch_header
from fastlaunch_train.process.machine import machine, num_data_workers, versions
from fastlaunch_train.records.contents import files_here
from fastlaunch_train.records.data_identity import DataIdentity, user_workload_identity
from fastlaunch_train.records.records import End, RecordWriter
from fastlaunch_train.run.options import Options
from fastlaunch_train.workloads.contract import Workload

log = logging.getLogger("fastlaunch_train")


@dataclass
class Session:
    """The facts known so far about the run. They make its header, early if the run fails early."""

    options: Options
    launch: LaunchSettings
    process: Process
    writer: RecordWriter
    traceback: TracebackFile
    attempt: int
    started_at: str
    # Assembly learns these, in this order.
    cudnn: tuple[int, ...] | None = None  #: cuDNN's loaded release
    workload: Workload | None = None
    batch_size: int | None = None  #: samples per rank
    steps: int = 1
    num_parameters: int | None = None
    flops_per_sample: int | None = None  #: operations per sample, as the workload states or as counted
    attention_backend: str | None = None
    data_identity: DataIdentity | None = None
    model_identity: Mapping[str, str | None] | None = None
    first_step: int = 1
    last_done: int = 0
    warnings: list[str] = field(default_factory=list)

    def identify(self) -> None:
        """Identify data and model once they were read, so that a run that fails before is not held up.

        An unreadable file, such as one removed since, leaves them unknown; the run goes on.
        """
        workload, source = self.workload, self.options.data
        assert workload is not None
        try:
            if workload.data_identity is not None:
                self.data_identity = workload.data_identity(source)
            elif ".py:" in self.options.workload:
                self.data_identity = user_workload_identity(self.options.workload, source)
            if workload.model_identity is not None:
                self.model_identity = workload.model_identity()
        except OSError as error:
            self.warnings.append(f"data and model could not be identified: {error.strerror}")

    def header(self) -> dict[str, Any]:
        """Return the record's header from the facts known now."""
        options, process, workload = self.options, self.process, self.workload
        return {
            "run_id": os.environ.get("FASTLAUNCH_RUN_ID") or options.output.resolve().name,
            "attempt": self.attempt,
            "rank": process.rank,
            "world_size": process.world_size,
            "num_nodes": process.num_nodes,
            "started_at": self.started_at,
            "workload": {
                "name": options.workload,
                "arguments": dict(options.arguments),
                "sample_unit": workload.sample_unit if workload else "samples",
                "flops_per_sample": self.flops_per_sample,
                "tokens_per_sample": workload.tokens_per_sample if workload else 0,
                "num_parameters": self.num_parameters,
                "sequence_length": workload.sequence_length if workload else None,
                "model": options.model,
                "model_identity": dict(self.model_identity) if self.model_identity else None,
                "metric": workload.metric if workload else None,
                # Its own; the recipe may replace them.
                "optimizer": workload.optimizer_name if workload and workload.trains else None,
                "learning_rate": workload.learning_rate if workload and workload.trains else None,
                # Which no recipe replaces.
                **{
                    name: getattr(workload, name) if workload and workload.trains else None
                    for name in ("weight_decay", "max_grad_norm", "lr_schedule", "warmup_steps")
                },
            },
            "recipe": options.recipe.to_record(),
            "batch_size_per_gpu": self.batch_size or options.batch_size or 1,
            "steps": self.steps,
            "first_step": self.first_step,
            "seed": options.seed,
            "data": options.data.partition(":")[0],
            "data_identity": self.data_identity.to_record() if self.data_identity else None,
            "num_data_workers": num_data_workers(),
            **launch_header(self.launch, os.environ),
            "machine": machine(process.device),
            "versions": versions(self.cudnn),
            "attention_backend": self.attention_backend,
            # The launcher has looked at a workload of the user's own.
            "files": files_here(os.environ) if ".py:" in options.workload else None,
            "warnings": self.warnings,
        }

    def end(self, status: str, message: str | None) -> bool:
        """Write pending lines and the end line; log an error and return False if the disk refuses."""
        peak_gib = memory_gib(self.process.device)[1]
        try:
            if not self.writer.header_written:
                self.writer.write_header(self.header())
            num_steps = max(self.last_done, self.writer.last_step)
            self.writer.add(
                End(status=status, message=message, num_steps=num_steps, peak_memory_gib=peak_gib)
            )
            self.writer.flush()
        except OSError as error:
            log.error("the record could not be finished: %s", error)
            return False
        return True

    def end_stuck(self, message: str) -> None:
        """End the record of a rank that was asked to stop and cannot; called from another thread."""
        self.end("interrupted", message)
        self.traceback.close()

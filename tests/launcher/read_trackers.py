"""What a tracker's own library finds in an export, as JSON: `read_trackers.py NAME FOLDER`.

By run: params, tags, figures, and metrics as [step, seconds since 1970, value] by name. It runs where the
library is, without pytest.
"""

import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

#: LevelDB's log, in which W&B keeps its records: blocks, each of pieces with a header.
BLOCK_BYTES, FILE_HEADER_BYTES = 32768, 7
PIECE_HEADER = struct.Struct("<IHB")
LAST_PIECES = (1, 4)


def read_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    found = {}
    for run in client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]):
        metrics = {
            name: [
                [each.step, each.timestamp / 1000, each.value]
                for each in client.get_metric_history(run.info.run_id, name)
            ]
            for name in run.data.metrics
        }
        found[run.data.tags["fastlaunch.run_id"]] = {
            "name": run.info.run_name,
            "params": run.data.params,
            "tags": [*run.data.tags.values()],
            "status": run.info.status,
            "metrics": metrics,
        }
    return found


def read_wandb(folder: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for path in folder.glob("wandb/offline-run-*/run-*.wandb"):
        run: dict[str, Any] = {"metrics": {}}
        for data in leveldb_records(path.read_bytes()):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                run |= {"name": record.run.display_name, "params": config, "tags": list(record.run.tags)}
                found[record.run.run_id] = run
            elif kind == "history":
                values = {each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
                # Those of W&B's own differ from one writing to the next.
                for name, value in values.items():
                    if name.startswith("_"):
                        continue
                    row = [values["_step"], values["_timestamp"], value]
                    run["metrics"].setdefault(name, []).append(row)
            elif kind == "summary":
                for each in record.summary.update:
                    if each.key.startswith("summary/"):
                        run["metrics"][each.key] = [[0, 0.0, json.loads(each.value_json)]]
            elif kind == "exit":
                run["status"] = record.exit.exit_code
    return found


def leveldb_records(data: bytes) -> Iterator[bytes]:
    at, whole = FILE_HEADER_BYTES, b""
    while at + PIECE_HEADER.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < PIECE_HEADER.size:
            at += left
            continue
        _, length, kind = PIECE_HEADER.unpack_from(data, at)
        at += PIECE_HEADER.size
        whole += data[at : at + length]
        at += length
        if kind in LAST_PIECES:
            yield whole
            whole = b""


def read_tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found = {}
    for place in folder.iterdir():
        events = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        (content,) = events.PluginTagToContent("hparams").values()
        start = HParamsPluginData.FromString(content).session_start_info
        params = {
            name: getattr(value, str(value.WhichOneof("kind"))) for name, value in start.hparams.items()
        }
        metrics = {
            tag: [[each.step, each.wall_time, each.value] for each in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
        }
        found[params["run_id"]] = {
            "name": place.name,
            "params": params,
            "tags": sorted(map(str, params.values())),
            "metrics": metrics,
        }
    return found


READERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "tensorboard": read_tensorboard,
}

if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))

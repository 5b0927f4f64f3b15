"""`docker` of a simulated instance: a container is a process of this machine, in namespaces of its own.

It is process 1 there, with all that follows for signals, sees its two mounts and its environment, and no
network, unless it is the host's: as on EC2, no credentials then. Started by the simulator's `docker`, see
simulated_instance.
"""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

SIM = Path("/sim")
STATE = Path("/run/fake-docker")
#: Options of `docker run` that take a value; the rest are switches.
VALUES = {
    *("--name", "--log-driver", "--entrypoint", "--gpus", "--ipc", "--ulimit", "--stop-timeout", "-w"),
    *("--network", "--device"),
}


def main(argv: list[str]) -> int:
    settings = json.loads((SIM / "settings.json").read_text())
    STATE.mkdir(parents=True, exist_ok=True)
    with (SIM / "docker.log").open("a") as log:
        log.write(json.dumps(argv) + "\n")
    if not Path("/run/fake-systemd/docker.service").exists():
        return refuse("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")
    command, *rest = argv
    if command == "info":
        return 0
    if command == "login":
        password = sys.stdin.read().strip()
        if not password:
            return refuse("Error: Password Required")
        (STATE / "login").write_text(rest[-1])
        return 0
    if command == "pull":
        return pull(rest[-1], settings)
    if command == "run":
        return run(rest, settings)
    if command == "commit":
        # What a container has changed is changed for all that follow.
        container, image = rest
        if not (STATE / f"{container}.ended").exists():
            return refuse(f"Error response from daemon: No such container: {container}")
        (STATE / "image").write_text(image)
        return 0
    if command in ("stop", "kill"):
        wait_s = float(rest[rest.index("-t") + 1]) / settings["container_scale"] if command == "stop" else 0.0
        return stop(rest[-1], wait_s, listens=bool(settings["stand_in"]))
    return refuse(f"docker: {command!r} is not a docker command.")


def refuse(message: str, code: int = 1) -> int:
    print(message, file=sys.stderr)
    return code


def pull(image: str, settings: dict[str, object]) -> int:
    host = image.partition("/")[0]
    logged_in = (STATE / "login").exists() and (STATE / "login").read_text() == host
    if ".dkr.ecr." in host and not logged_in:
        return refuse("Error response from daemon: no basic auth credentials")
    if image in settings["missing_images"]:  # type: ignore[operator]
        return refuse(f"Error response from daemon: manifest for {image} not found")
    (STATE / "image").write_text(image)
    print(image)
    return 0


def run(argv: list[str], settings: dict[str, object]) -> int:
    options: dict[str, list[str]] = {}
    position = 0
    while argv[position].startswith("-"):
        name = argv[position]
        if name in VALUES or name in ("-v", "-e"):
            options.setdefault(name, []).append(argv[position + 1])
            position += 1
        position += 1
    image, *arguments = argv[position:]
    if not (STATE / "image").exists() or (STATE / "image").read_text() != image:
        return refuse(f"Unable to find image '{image}' locally", 125)
    if settings["broken_runtime"]:
        return refuse("could not select device driver with capabilities: [[gpu]]", 125)
    command = [*options.get("--entrypoint", []), *arguments]
    if settings["stand_in"]:
        command = [str(settings["python"]), str(settings["stand_in"]), *arguments[1:]]
    # The test's own interpreter stands for the image's.
    environment = {"PATH": f"{settings['python_folder']}:/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
    if settings["stand_in"]:
        environment |= {"PYTHONPATH": str(settings["stand_in_path"]), "FAKE_STEP_S": "0.01"}
    for entry in options.get("-e", []):
        name, is_given, value = entry.partition("=")
        environment[name] = value if is_given else os.environ[name]
    mounts = ["set -e", "mount -t proc proc /proc", "ip link set lo up"]
    for volume in options.get("-v", []):
        source, target, *mode = volume.split(":")
        mounts.append(f"mkdir -p {target}; mount --bind {shlex.quote(source)} {target}")
        if mode == ["ro"]:
            mounts.append(f"mount -o remount,bind,ro {target}")
    mounts.append(f"cd {shlex.quote(options['-w'][0])}")
    words = [f"{name}={value}" for name, value in environment.items()]
    mounts.append(f"exec env -i {shlex.join([*words, *command])}")
    alone = [] if options.get("--network") == ["host"] or settings["reaches_web"] else ["--net"]
    namespaces = ["unshare", "--mount", *alone, "--pid", "--fork", "--kill-child"]
    child = subprocess.Popen([*namespaces, "bash", "-c", "\n".join(mounts)], start_new_session=True)
    (STATE / options["--name"][0]).write_text(str(child.pid))
    code = child.wait()
    (STATE / options["--name"][0]).unlink()
    (STATE / f"{options['--name'][0]}.ended").touch()
    for output in (entry.split(":")[0] for entry in options["-v"] if entry.endswith(":/out")):
        note_records(output)
    killed = STATE / f"{options['--name'][0]}.killed"
    if killed.exists():
        killed.unlink()
        return 128 + signal.SIGKILL
    return 128 - code if code < 0 else code


def note_records(output: str) -> None:
    """Keep what the run's records are when it has ended: what arrives elsewhere must be the same."""
    with (SIM / "records").open("a") as noted:
        for path in sorted(Path(output).glob("rank-*.jsonl")):
            name = f"{Path(output).name}/{path.name}"
            noted.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()} {name}\n")


def stop(name: str, wait_s: float, *, listens: bool) -> int:
    """SIGTERM to the container's first process, and SIGKILL after `wait_s` (SIGKILL at once for 0).

    listens: not before it has said what it does on SIGTERM. run_train.sh says so in its first lines; what
    stands in for it is a Python that takes a while to start, and as process 1 would miss it meanwhile.
    """
    try:
        outer = int((STATE / name).read_text())
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    except (OSError, ValueError):
        return refuse(f"Error response from daemon: No such container: {name}")
    for child in map(int, children):
        if wait_s:
            end = time.monotonic() + 10.0
            while listens and not _has_said(child, signal.SIGTERM) and time.monotonic() < end:
                time.sleep(0.02)
            os.kill(child, signal.SIGTERM)
        end = time.monotonic() + wait_s
        while Path(f"/proc/{child}").exists() and time.monotonic() < end:
            time.sleep(0.02)
        if Path(f"/proc/{child}").exists():
            (STATE / f"{name}.killed").touch()
            os.kill(child, signal.SIGKILL)
    print(name)
    return 0


def _has_said(process: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal, or ignores it; or is no more."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True
    masks = [
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigCgt", "SigIgn"))
    ]
    return any(mask >> (number - 1) & 1 for mask in masks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
